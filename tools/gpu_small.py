"""One small call of every CUDA op, for compute-sanitizer to watch."""

from __future__ import annotations

import torch

from tests.gpu.test_launchers import NAMES, cases


def main() -> None:
    torch.manual_seed(1)
    for name in NAMES:
        op, arguments = cases()[name]
        op(*arguments)
        torch.cuda.synchronize()
    print(f"{len(NAMES)} ops ran")


if __name__ == "__main__":
    main()
