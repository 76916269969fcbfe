// The linear over panels of sixteen columns, transposed into words of 32 bits (one float32, or two bfloat16 that follow
// each other in depth), so that a vector holds a word of sixteen columns: a row's word meets it in every lane, and no
// sum has to be gathered from lanes at the end. Each product is one running sum over depth, whatever the rows beside.
// Many rows pay for the transposing on the way; few do where the matrix lies in such panels already.
#include "activation.h"
#include "ahead.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// Rows and panels of a tile, and how many rows are few: they go in one tile against one panel after the other, so that
// a packed matrix is read in one run, which is what few rows wait for; against some more where it is in a cache.
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileGroups = 3, kFewRows = 12, kFewGroups = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTileGroups = 1, kFewRows = 4, kFewGroups = 1;
#else
constexpr int kTileRows = 2, kTileGroups = 1, kFewRows = 2, kFewGroups = 1;
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

int64_t tile_count(const PanelArgs& p, int64_t most = kTileRows) { return (p.row_end - p.row_begin + most - 1) / most; }

bool is_for_few(const PanelArgs& p) { return p.packed && p.row_end - p.row_begin <= kFewRows; }

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

// Words of packed panels that are read ahead for few rows: what they and a part of the rows leave of the nearest cache.
constexpr int64_t kNear = 256;

// What is read ahead: `near`, of the panels at hand as many words ahead, and of other memory a few lines at a word. Two
// pieces of memory take turns.
struct Reading {
  int64_t near;
  Ahead first{}, second{};
  bool has_second = false;

  inline __attribute__((always_inline)) void step(int64_t word) {
    if (has_second && word % 2 != 0) {
      second.step();
    } else {
      first.step();
    }
  }
};

// The products of R rows from `row` on and of G panels, to out[r * G + g].
template <class T, int R, int G>
__attribute__((noinline)) void multiply(const LinearArgs& a, int64_t row, const uint32_t* const* panels,
                                        Reading& reading, Vec* out) {
  using Element = typename T::Element;
  constexpr int64_t kPer = Words<T>::kPer;
  const int64_t words = word_count<T>(a.depth), whole = a.depth / kPer;
  const Element* x[R];
  const uint32_t* w[G];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const Element*>(a.x) + (row + r) * a.x_row;
  for (int g = 0; g < G; ++g) w[g] = panels[g];
  Reading own = reading;
  Vec sums[R * G] = {};
  for (int64_t word = 0; word < words; ++word) {
    own.step(word);
    WordVec columns[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      columns[g] = load_as<WordVec>(w[g] + word * 16);
      __builtin_prefetch(w[g] + (word + own.near) * 16);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      uint32_t bits = 0;
      memcpy(&bits, x[r] + word * kPer, word < whole ? 4 : sizeof(Element));
      const WordVec spread = WordVec{} + bits;
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[r * G + g] = Words<T>::add(spread, columns[g], sums[r * G + g]);
    }
  }
  reading = own;
  memcpy(out, sums, sizeof(sums));
}

// The same for a number of rows up to R.
template <class T, int G, int R>
void multiply_some(const LinearArgs& a, int64_t row, int64_t rows, const uint32_t* const* panels, Reading& reading,
                   Vec* out) {
  if (rows == R) return multiply<T, R, G>(a, row, panels, reading, out);
  if constexpr (R > 1) multiply_some<T, G, R - 1>(a, row, rows, panels, reading, out);
}

PYRUNTIME_INLINE Vec bias_of(const LinearArgs& a, int64_t column, int64_t count) {
  return a.bias == nullptr ? Vec{} : load_first<Vec>(a.bias + column, count, sizeof(float));
}

// All rows of G panels whose first column is `column`. Gated: of a panel of gates and one of what they let through.
// Rows go in tiles of about one size, at most Most, each of which reads its share ahead.
template <class T, int Most, int G, bool Gated, Activation A>
void rows_of_panels(const PanelArgs& p, int64_t column, int64_t end, const uint32_t* const* panels, Reading reading) {
  using Element = typename T::Element;
  constexpr int kOut = Gated ? 1 : G;
  const LinearArgs& a = p.linear;
  const int64_t rows = p.row_end - p.row_begin, tiles = tile_count(p, Most);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = p.row_begin + rows * tile / tiles, last = p.row_begin + rows * (tile + 1) / tiles;
    Vec products[Most * G];
    multiply_some<T, G, Most>(a, first, last - first, panels, reading, products);
    for (int g = 0; g < kOut; ++g) {
      const int64_t at = column + g * 16, count = end - at < 16 ? end - at : 16;
      const Vec bias = bias_of(a, at, count);
      for (int64_t row = first; row < last; ++row) {
        Vec y = activate<A>(products[(row - first) * G + g] + bias);
        if constexpr (Gated) y *= products[(row - first) * G + 1];
        store_narrow<T>(static_cast<Element*>(a.out) + row * a.out_row + at, y, count);
      }
    }
  }
}

// Where the panel that begins with a column lies in packed panels.
template <class T>
const uint32_t* packed_panel(const PanelArgs& p, const void* w, int64_t column) {
  return static_cast<const uint32_t*>(w) + column * word_count<T>(p.linear.depth);
}

// One panel after the other waits for memory alone; what is in a cache comes sooner than the sums of one panel take,
// each of which waits for the one before it.
template <class T, bool Gated, Activation A>
void run_few(const PanelArgs& p, int64_t begin, int64_t end) {
  const auto panel = [&](const void* w, int64_t column) { return packed_panel<T>(p, w, column); };
  for (int64_t column = begin; column < end; column += 16) {
    const uint32_t* panels[2] = {panel(p.linear.w, column)};
    if constexpr (Gated) panels[1] = panel(p.up, column);
    if (!Gated && kFewGroups > 1 && p.cached && end - column > 16) {
      panels[1] = panel(p.linear.w, column + 16);
      rows_of_panels<T, kFewRows, kFewGroups, false, A>(p, column, end, panels, {kNear});
      column += 16;
    } else {
      rows_of_panels<T, kFewRows, Gated ? 2 : 1, Gated, A>(p, column, end, panels, {kNear});
    }
  }
}

template <class T, bool Gated, Activation A>
void run(const PanelArgs& p, int64_t begin, int64_t end, uint32_t* memory) {
  if (is_for_few(p)) return run_few<T, Gated, A>(p, begin, end);
  const LinearArgs& a = p.linear;
  const int64_t size = word_count<T>(a.depth) * 16, steps = tile_count(p) * word_count<T>(a.depth);
  constexpr int64_t kWidth = Gated ? 16 : 16 * kTileGroups;
  // What sixteen columns take of a matrix, and where it starts for those from `column` on.
  const int64_t bytes = p.packed ? size * 4 : 16 * a.w_row * static_cast<int64_t>(sizeof(typename T::Element));
  const auto part = [&](const void* w, int64_t column) { return static_cast<const char*>(w) + column / 16 * bytes; };
  const auto panel = [&](const void* w, int64_t column, int64_t place) -> const uint32_t* {
    if (p.packed) return packed_panel<T>(p, w, column);
    pack<T>(a, w, column, end, memory + place * size);
    return memory + place * size;
  };
  for (int64_t column = begin; column < end; column += kWidth) {
    const int64_t groups = Gated ? 1 : ((end - column < kWidth ? end - column : kWidth) + 15) / 16;
    const uint32_t* panels[kTileGroups + 1];
    for (int64_t g = 0; g < groups; ++g) panels[g] = panel(a.w, column + g * 16, g);
    if constexpr (Gated) panels[1] = panel(p.up, column, 1);
    // The next columns, those of the next thread at the end: columns that are not there are not read.
    const int64_t next = column + kWidth, left = a.columns / 16 * 16 - next;
    const int64_t ahead = (left < kWidth ? (left > 0 ? left : 0) : kWidth) / 16 * bytes;
    Reading reading{0, read_within(part(a.w, next), ahead, Gated ? steps / 2 : steps)};
    if constexpr (Gated) {
      reading.second = read_within(part(p.up, next), ahead, steps / 2), reading.has_second = true;
      rows_of_panels<T, kTileRows, 2, true, A>(p, column, end, panels, reading);
    } else if (groups == kTileGroups) {
      rows_of_panels<T, kTileRows, kTileGroups, false, A>(p, column, end, panels, reading);
    } else if (kTileGroups == 3 && groups == 2) {
      rows_of_panels<T, kTileRows, kTileGroups == 3 ? 2 : 1, false, A>(p, column, end, panels, reading);
    } else {
      rows_of_panels<T, kTileRows, 1, false, A>(p, column, end, panels, reading);
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
