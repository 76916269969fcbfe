// The linear for many rows. A panel of columns is transposed once into words of 32 bits (one float32, or two bfloat16
// that follow each other in depth), so that a vector holds a word of sixteen columns: a row's word meets it in every
// lane, and no sum has to be gathered from lanes at the end. Each product is one running sum over depth, whatever the
// rows beside.
#include "activation.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileGroups = 3;
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTileGroups = 1;
#else
constexpr int kTileRows = 2, kTileGroups = 1;
#endif

// How many elements of depth a word holds, and a word's products added to sums.
template <class T>
struct Words {};
template <>
struct Words<Float32> {
  static constexpr int64_t kPer = 1;
  PYRUNTIME_INLINE Vec add(WordVec x, WordVec w, Vec sum) {
    return reinterpret_cast<Vec>(x) * reinterpret_cast<Vec>(w) + sum;
  }
};
#if defined(__AVX512BF16__)
template <>
struct Words<BFloat16> {
  static constexpr int64_t kPer = 2;
  PYRUNTIME_INLINE Vec add(WordVec x, WordVec w, Vec sum) {
    return reinterpret_cast<Vec>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w)));
  }
};
#endif

template <class T>
constexpr int64_t word_count(int64_t depth) {
  return (depth + Words<T>::kPer - 1) / Words<T>::kPer;
}

// Columns [column, column + 16) of w, zeros past `end`, as words [word][16].
template <class T>
void pack(const LinearArgs& a, const void* w, int64_t column, int64_t end, uint32_t* panel) {
  using Element = typename T::Element;
  constexpr int64_t kSize = sizeof(Element), kBlock = kLanes * Words<T>::kPer;
  const Element* first = static_cast<const Element*>(w) + column * a.w_row;
  // In the order in which they lie in memory; below they are read sixteen rows at a time.
  const int64_t lines = (end - column < 16 ? end - column : 16) * a.w_row * kSize / 64;
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(reinterpret_cast<const char*>(first) + i * 64, 0, 2);
  for (int64_t d = 0; d < a.depth; d += kBlock) {
    Vec block[16];
    for (int64_t c = 0; c < 16; ++c) {
      const Element* from = first + c * a.w_row + d;
      block[c] = Vec{};
      if (column + c >= end) continue;
      block[c] = a.depth - d >= kBlock ? load_as<Vec>(from) : load_first<Vec>(from, a.depth - d, kSize);
    }
    transpose(block);
    const int64_t words = word_count<T>(a.depth - d), count = words < kLanes ? words : kLanes;
    memcpy(panel + d / Words<T>::kPer * 16, block, static_cast<size_t>(count) * sizeof(Vec));
  }
}

// The products of R rows and the G groups of a panel.
template <class T, int R, int G>
PYRUNTIME_INLINE void multiply(const typename T::Element* const (&x)[R], const uint32_t* panel, int64_t depth,
                               Vec (&sums)[R * G]) {
  constexpr int64_t kPer = Words<T>::kPer;
  const int64_t words = word_count<T>(depth), whole = depth / kPer;
#pragma GCC unroll 24
  for (int i = 0; i < R * G; ++i) sums[i] = Vec{};
  for (int64_t word = 0; word < words; ++word) {
    WordVec columns[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) columns[g] = load_as<WordVec>(panel + (g * words + word) * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      uint32_t bits = 0;
      memcpy(&bits, x[r] + word * kPer, word < whole ? 4 : sizeof(typename T::Element));
      const WordVec row = WordVec{} + bits;
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[r * G + g] = Words<T>::add(row, columns[g], sums[r * G + g]);
    }
  }
}

PYRUNTIME_INLINE Vec bias_of(const LinearArgs& a, int64_t column, int64_t count) {
  return a.bias == nullptr ? Vec{} : load_first<Vec>(a.bias + column, count, sizeof(float));
}

// Rows [row, row + R) of a panel whose first column is `column`. Gated: its first half are gates, its second what they
// let through.
template <class T, int R, int G, bool Gated, Activation A>
PYRUNTIME_INLINE void finish(const LinearArgs& a, int64_t row, int64_t column, int64_t end, const uint32_t* panel) {
  using Element = typename T::Element;
  const Element* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const Element*>(a.x) + (row + r) * a.x_row;
  Vec sums[R * G];
  multiply<T, R, G>(x, panel, a.depth, sums);
  constexpr int kOut = Gated ? G / 2 : G;
#pragma GCC unroll 3
  for (int g = 0; g < kOut; ++g) {
    const int64_t at = column + g * 16, count = end - at < 16 ? end - at : 16;
    const Vec bias = bias_of(a, at, count);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vec y = activate<A>(sums[r * G + g] + bias);
      if constexpr (Gated) y *= sums[r * G + g + kOut];
      store_narrow<T>(static_cast<Element*>(a.out) + (row + r) * a.out_row + at, y, count);
    }
  }
}

// Reads ahead what the next panel is made of, a share of it beside every tile of this one.
struct Ahead {
  const char* from;
  int64_t lines, tiles, tile = 0;

  void step() {
    if (tiles == 0) return;
    const int64_t begin = lines * tile / tiles, end = lines * (tile + 1) / tiles;
    for (int64_t line = begin; line < end; ++line) __builtin_prefetch(from + line * 64, 0, 2);
    ++tile;
  }
};

template <class T, int G, bool Gated, Activation A>
void rows_of_panel(const PanelArgs& p, int64_t column, int64_t end, Ahead ahead, const uint32_t* panel) {
  constexpr int kRows = Gated && kTileGroups == 1 ? kTileRows / 2 : kTileRows;
  const LinearArgs& a = p.linear;
  int64_t row = p.row_begin;
  for (; row + kRows <= p.row_end; row += kRows) {
    ahead.step();
    finish<T, kRows, G, Gated, A>(a, row, column, end, panel);
  }
  if constexpr (kRows > 4) {
    for (; row + 4 <= p.row_end; row += 4) finish<T, 4, G, Gated, A>(a, row, column, end, panel);
  }
  if constexpr (kRows > 2) {
    for (; row + 2 <= p.row_end; row += 2) finish<T, 2, G, Gated, A>(a, row, column, end, panel);
  }
  for (; row < p.row_end; ++row) finish<T, 1, G, Gated, A>(a, row, column, end, panel);
}

template <class T, bool Gated, Activation A>
void run(const PanelArgs& p, int64_t begin, int64_t end, uint32_t* panel) {
  const LinearArgs& a = p.linear;
  const int64_t group = word_count<T>(a.depth) * 16;
  constexpr int64_t kWidth = Gated ? 16 : 16 * kTileGroups;
  const int64_t tiles = (p.row_end - p.row_begin) / kTileRows;
  for (int64_t column = begin; column < end; column += kWidth) {
    const int64_t groups = Gated ? 1 : ((end - column < kWidth ? end - column : kWidth) + 15) / 16;
    for (int64_t g = 0; g < groups; ++g) pack<T>(a, a.w, column + g * 16, end, panel + g * group);
    if constexpr (Gated) pack<T>(a, p.up, column, end, panel + group);
    const int64_t next = column + kWidth, bytes = a.w_row * static_cast<int64_t>(sizeof(typename T::Element));
    const int64_t wide = end - next < kWidth ? end - next : kWidth;
    Ahead ahead{static_cast<const char*>(a.w) + next * bytes, wide * bytes / 64, next < end ? tiles : 0};
    if constexpr (Gated) {
      rows_of_panel<T, 2, true, A>(p, column, end, ahead, panel);
    } else if (groups == kTileGroups) {
      rows_of_panel<T, kTileGroups, false, A>(p, column, end, ahead, panel);
    } else if (kTileGroups == 3 && groups == 2) {
      rows_of_panel<T, kTileGroups == 3 ? 2 : 1, false, A>(p, column, end, ahead, panel);
    } else {
      rows_of_panel<T, 1, false, A>(p, column, end, ahead, panel);
    }
  }
}

template <class T>
void dispatch(const PanelArgs& p, int64_t begin, int64_t end, uint32_t* panel) {
  with_activation(p.activation, [&](auto activation) {
    if (p.up != nullptr) {
      run<T, true, decltype(activation)::value>(p, begin, end, panel);
    } else {
      run<T, false, decltype(activation)::value>(p, begin, end, panel);
    }
  });
}

}  // namespace

int64_t panel_columns(const PanelArgs& p) { return p.up != nullptr ? 16 : 16 * kTileGroups; }

int64_t panel_words(const PanelArgs& p) {
#if defined(__AVX512BF16__)
  if (p.linear.dtype == DType::kBFloat16) return word_count<BFloat16>(p.linear.depth) * 16 * (kTileGroups + 1);
#endif
  return p.linear.dtype == DType::kFloat32 ? p.linear.depth * 16 * (kTileGroups + 1) : 0;
}

void panels(const PanelArgs& p, int64_t begin, int64_t end, uint32_t* panel) {
#if defined(__AVX512BF16__)
  if (p.linear.dtype == DType::kBFloat16) return dispatch<BFloat16>(p, begin, end, panel);
#endif
  dispatch<Float32>(p, begin, end, panel);
}

}  // namespace pyruntime::PYRUNTIME_ISA
