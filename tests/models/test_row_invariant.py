"""With the option ``deterministic`` the rows of every architecture are the same bits in any batch and any chunks."""

import random

import pytest
import torch
from torch.nn import functional

from pyruntime.model.row_invariant import ELEMENTWISE, PIECE, in_vectors
from pyruntime.self_check import run_batched
from tests.models.architectures import DECODERS, factory_of, load, parts, save

# An inner width at which torch leaves the end of a row to scalar code, unlike at powers of two.
ODD = {"intermediate_size": 100}
KINDS = {
    "qwen3": DECODERS["qwen3"] | ODD,  # silu
    "gemma3_text": DECODERS["gemma3_text"] | ODD,  # gelu by tanh
    "gpt2": DECODERS["gpt2"],  # transposed linears
    "mixtral": DECODERS["mixtral"] | ODD,  # router and experts as linears
    "gpt_oss": DECODERS["gpt_oss"] | ODD,  # experts as matrix products, gates by sigmoid
    "deepseek_v3": DECODERS["deepseek_v3"],  # float32 router, shared experts
}


@pytest.mark.parametrize("name", KINDS)
def test_a_texts_rows_are_the_same_bits_in_any_company(tmp_path, name):
    save(tmp_path, name, KINDS[name], factory_of(name, True))
    generator = random.Random(1)
    texts, company = (
        [[generator.randrange(3, 190) for _ in range(length)] for length in lengths]
        for lengths in ((1, 7, 40, 77, 33), (110, 5, 61, 90))
    )
    for dtype in ("float32", "bfloat16") if name == "gemma3_text" else ("float32",):
        loaded = load(tmp_path, dtype, deterministic=True)

        def rows(batch, budget, loaded=loaded):
            runner, scheduler, builder = parts(loaded, budget, num_blocks=400)
            return run_batched(runner, scheduler, builder, batch)

        alone = [rows([text], 512)[0] for text in texts]
        for budget in (2048, 40):
            together = rows(company[:2] + texts + company[2:], budget)[2 : 2 + len(texts)]
            assert all(map(torch.equal, together, alone)), (dtype, budget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", ELEMENTWISE)
def test_an_elements_value_does_not_depend_on_its_place(function, dtype):
    x = torch.randn(41, 1009, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x.abs() if function in (torch.rsqrt, torch.Tensor.rsqrt) else x
    assert x.numel() > 2 * PIECE
    whole = in_vectors(function, x)
    assert whole.shape == x.shape
    torch.testing.assert_close(whole, function(x), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    for place in (0, 17, 40):
        assert torch.equal(in_vectors(function, x[place, 3:]), whole[place, 3:])
    assert torch.equal(in_vectors(function, x[:, ::2]), whole[:, ::2])


def test_options_of_a_function_are_kept():
    x = torch.linspace(-3, 3, 101)
    torch.testing.assert_close(
        in_vectors(functional.gelu, x, approximate="tanh"), functional.gelu(x, approximate="tanh")
    )
    torch.testing.assert_close(in_vectors(functional.elu, x, 0.5), functional.elu(x, 0.5))
