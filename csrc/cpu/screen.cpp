// largest_columns: bounds of all panels, then the products of those that can hold the largest.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "../checks.h"
#include "int8_rows.h"
#include "linear.h"
#include "ops.h"

namespace pyruntime {
namespace {

// Panels of an item of the first pass: whole blocks of sixteen, and whole triples, which are multiplied together.
constexpr int64_t kRun = 48;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Best {
  float value = kNothing;
  int64_t id = -1;

  // The larger one, the lower id of equal ones.
  void meet(float other, int64_t other_id) {
    if (other > value || (other == value && other_id < id)) value = other, id = other_id;
  }
};

// A panel that can hold the largest product of the rows [begin, end) of a list.
struct Survivor {
  int64_t panel, begin, end;
};

class Screening {
 public:
  Screening(const LinearArgs& linear, const Int8Rows& rows, const Tensor& screen, const float* errors,
            const float* lengths)
      : linear_(linear),
        panels_(linear.columns / 16),
        blocks_((panels_ + 15) / 16),
        weights_(2 * linear.rows),
        tops_(blocks_ * linear.rows * 16),
        wanted_(static_cast<size_t>(linear.rows), kNothing),
        masks_(static_cast<size_t>(blocks_ * linear.rows)) {
    args_.product = int8_linear(rows.rows());
    args_.product.w = rows.check_matrix(screen, "screen", linear.columns), args_.product.columns = linear.columns;
    args_.errors = errors, args_.lengths = lengths;
    args_.rows = linear.rows, args_.tops = tops_.get();
    kernels().screen_rows(rows.rows(), 0, linear.rows, weights_.get(), weights_.get() + linear.rows);
    args_.error_weights = weights_.get(), args_.length_weights = weights_.get() + linear.rows;
  }

  std::vector<Best> largest() {
    bound();
    find_survivors();
    drop_hopeless();
    list_survivors();
    return multiply_survivors();
  }

 private:
  size_t rows() const { return static_cast<size_t>(linear_.rows); }

  // The bounds of every panel, and of each row what an upper bound must reach to matter.
  void bound() {
    const int64_t items = (panels_ + kRun - 1) / kRun;
    std::vector<float> least(static_cast<size_t>(items) * rows());
    for_each_neighbour_of(items, [&] {
      return [&, scratch = std::make_shared<Scratch>(linear_.rows * 16)](int64_t i) {
        kernels().screen(args_, i * kRun, std::min(panels_, (i + 1) * kRun), &least[static_cast<size_t>(i) * rows()],
                         scratch->get());
      };
    });
    for (size_t i = 0; i < least.size(); ++i) wanted_[i % rows()] = std::max(wanted_[i % rows()], least[i]);
    // Products that differ by no more than a step of the dtype can be one number when they are rounded to it; those
    // below its normal numbers become zero.
    const float step = linear_.dtype == DType::kFloat32 ? 0.0f : 0x1.04p-7f;
    for (size_t row = 0; row < rows(); ++row) {
      wanted_[row] -= std::abs(wanted_[row]) * step + 0x1p-100f;
      // NaN in one of them is NaN in no bound.
      const bool holds = args_.error_weights[row] >= 0.0f && args_.length_weights[row] >= 0.0f;
      if (!holds) wanted_[row] = std::numeric_limits<float>::infinity();
    }
  }

  void find_survivors() {
    constexpr int64_t kBlocks = 64;
    for_each_neighbour((blocks_ + kBlocks - 1) / kBlocks, [&](int64_t i) {
      kernels().screened(args_, i * kBlocks, std::min(blocks_, (i + 1) * kBlocks), wanted_.data(), masks_.data());
    });
  }

  // Rows of which so much is left that the whole product is as cheap have none of it computed here.
  void drop_hopeless() {
    std::vector<int64_t> counts(rows());
    int64_t total = 0;
    for (size_t at = 0; at < masks_.size(); ++at) counts[at % rows()] += std::popcount(masks_[at]);
    for (const int64_t count : counts) total += count;
    const int64_t most = total > panels_ / 8 * linear_.rows ? panels_ / 8 : panels_ / 2;
    for (size_t row = 0; row < rows(); ++row) {
      if (counts[row] <= most) continue;
      for (size_t at = row; at < masks_.size(); at += rows()) masks_[at] = 0;
    }
  }

  void list_survivors() {
    for (int64_t block = 0; block < blocks_; ++block) {
      const uint16_t* masks = masks_.data() + block * linear_.rows;
      uint32_t any = 0;
      for (size_t row = 0; row < rows(); ++row) any |= masks[row];
      for (; any != 0; any &= any - 1) {
        const int place = std::countr_zero(any);
        const int64_t begin = static_cast<int64_t>(listed_.size());
        for (size_t row = 0; row < rows(); ++row) {
          if ((masks[row] >> place) & 1) listed_.push_back(static_cast<int64_t>(row));
        }
        survivors_.push_back({block * 16 + place, begin, static_cast<int64_t>(listed_.size())});
      }
    }
  }

  // By the kernel that computes the whole product, whose bits do not depend on the rows and columns beside.
  std::vector<Best> multiply_survivors() {
    std::vector<Best> found(listed_.size()), best(rows());
    const int64_t size = linear_.dtype == DType::kFloat32 ? 4 : 2, width = linear_.depth * size;
    for_each_neighbour_of(static_cast<int64_t>(survivors_.size()), [&] {
      return [&, memory = std::make_shared<Scratch>(linear_.rows * (width + 16 * size + 128) / 4)](int64_t i) {
        const Survivor& survivor = survivors_[static_cast<size_t>(i)];
        const int64_t count = survivor.end - survivor.begin;
        char* out = reinterpret_cast<char*>(memory->get());
        multiply(survivor, out + linear_.rows * 16 * size, out);
        for (int64_t r = 0; r < count; ++r) {
          for (int64_t c = 0; c < 16; ++c) {
            found[static_cast<size_t>(survivor.begin + r)].meet(value(out + (r * 16 + c) * size),
                                                                survivor.panel * 16 + c);
          }
        }
      };
    });
    for (size_t i = 0; i < found.size(); ++i) best[static_cast<size_t>(listed_[i])].meet(found[i].value, found[i].id);
    return best;
  }

  // Its rows, gathered in `gathered`, by its panel → out [rows, 16] of the rows' dtype.
  void multiply(const Survivor& survivor, char* gathered, char* out) const {
    const int64_t size = linear_.dtype == DType::kFloat32 ? 4 : 2, words = (linear_.depth * size + 3) / 4;
    PanelArgs p{linear_, nullptr, true, Activation::kNone, 0, survivor.end - survivor.begin};
    LinearArgs& a = p.linear;
    a.w = static_cast<const char*>(linear_.w) + survivor.panel * words * 64;
    a.rows = p.row_end, a.columns = 16;
    a.out = out, a.out_row = 16;
    a.x = gathered, a.x_row = linear_.depth;
    for (int64_t r = 0; r < a.rows; ++r) {
      const char* from =
          static_cast<const char*>(linear_.x) + listed_[static_cast<size_t>(survivor.begin + r)] * linear_.x_row * size;
      std::memcpy(gathered + r * linear_.depth * size, from, static_cast<size_t>(linear_.depth * size));
    }
    kernels().panels(p, 0, 16, nullptr);
  }

  float value(const char* at) const {
    uint32_t bits = 0;
    if (linear_.dtype == DType::kFloat32) {
      std::memcpy(&bits, at, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, at, 2);
      bits = static_cast<uint32_t>(half) << 16;  // bfloat16: no other has packed panels
    }
    return std::bit_cast<float>(bits);
  }

  LinearArgs linear_;
  int64_t panels_, blocks_;
  Scratch weights_, tops_;
  ScreenArgs args_{};
  std::vector<float> wanted_;
  std::vector<uint16_t> masks_;  // [blocks, rows]: which of a block's panels survive
  std::vector<int64_t> listed_;
  std::vector<Survivor> survivors_;
};

std::tuple<Tensor, Tensor> largest_columns(const Tensor x, const Tensor w, const Tensor screen, const Tensor errors,
                                           const Tensor lengths) {
  const Product product = check_packed(x, w, std::nullopt);
  const LinearArgs& a = product.args;
  const PanelArgs panels{a, nullptr, true, Activation::kNone, 0, 0};
  require(kernels().panel_words(panels) > 0, "x: ", describe(x), " has no such kernel on this processor");
  check_array(errors, "errors", ScalarType::Float, {a.columns});
  check_array(lengths, "lengths", ScalarType::Float, {a.columns});
  Tensor ids = empty_cpu({a.rows}, ScalarType::Long), values = empty_cpu({a.rows}, ScalarType::Float);
  if (a.rows == 0) return {ids, values};
  const Int8Rows rows(x);
  Screening screening(a, rows, screen, errors.const_data_ptr<float>(), lengths.const_data_ptr<float>());
  const std::vector<Best> best = screening.largest();
  for (size_t row = 0; row < best.size(); ++row) {
    ids.mutable_data_ptr<int64_t>()[row] = best[row].id;
    values.mutable_data_ptr<float>()[row] = best[row].value;
  }
  return {ids, values};
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("largest_columns", TORCH_BOX(&pyruntime::largest_columns)); }
