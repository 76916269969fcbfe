// packed_attention and paged_attention: checks, tiles, threads.
#include <algorithm>
#include <limits>
#include <vector>

#include "../attention_checks.h"
#include "dispatch.h"
#include "ops.h"
#include "scalars.h"

namespace pyruntime {
namespace {

void check_queries(const Tensor& q, const Tensor& k, const Tensor& v, int64_t key_heads_at) {
  check_floating(q, "q");
  check_cpu(k, "k");
  check_cpu(v, "v");
  check_heads(q, k, v, key_heads_at);
}

AttentionArgs common(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out, int64_t key_heads_at, bool causal,
                     double scale, int64_t window_left, int64_t window_right, double softcap,
                     const std::optional<Tensor>& sinks) {
  check_windows(window_left, window_right);
  AttentionArgs a{};
  a.q = q.const_data_ptr();
  a.k = k.const_data_ptr();
  a.v = v.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.dtype = check_floating(q, "q");
  a.q_row = q.stride(0), a.q_head = q.stride(1);
  a.k_row = k.stride(key_heads_at - 1), a.k_head = k.stride(key_heads_at);
  a.v_row = v.stride(key_heads_at - 1), a.v_head = v.stride(key_heads_at);
  a.q_heads = q.size(1), a.kv_heads = k.size(key_heads_at);
  a.key_width = q.size(2), a.value_width = v.size(key_heads_at + 1);
  a.causal = causal;
  a.scale = check_scale(scale), a.softcap = check_softcap(softcap);
  // No sequence is longer, and positions can be added to it.
  constexpr int64_t kFurthest = std::numeric_limits<int32_t>::max();
  a.window_left = std::min(window_left, kFurthest), a.window_right = std::min(window_right, kFurthest);
  if (sinks.has_value()) {
    check_array(*sinks, "sinks", ScalarType::Float, {a.q_heads});
    a.sinks = sinks->const_data_ptr<float>();
  }
  return a;
}

// Few tiles: the threads share their keys. A part of a long row costs as much as a short row, so pieces are the items.
void launch_split(const AttentionArgs& a, const std::vector<AttentionTile>& tiles) {
  const Kernels& table = kernels();
  struct Piece {
    int64_t tile, split;
  };
  std::vector<Piece> pieces;
  std::vector<int64_t> begins;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const KeySplits splits = table.attention_splits(a, tiles[i]);
    begins.push_back(static_cast<int64_t>(pieces.size()));
    for (int64_t n = 0; n < splits.count; ++n) pieces.push_back({static_cast<int64_t>(i), splits.first + n});
  }
  begins.push_back(static_cast<int64_t>(pieces.size()));
  const int64_t size = table.attention_part(a), scratch = table.attention_scratch(a);
  const Scratch parts(size * static_cast<int64_t>(pieces.size()));
  for_each_item(static_cast<int64_t>(pieces.size()), [&] {
    return [&, buffer = std::make_shared<Scratch>(scratch)](int64_t i) {
      table.attention_split(a, tiles[pieces[i].tile], pieces[i].split, buffer->get(), parts.get() + i * size);
    };
  });
  const Scratch buffer(scratch);
  for (size_t i = 0; i < tiles.size(); ++i) {
    table.attention_join(a, tiles[i], parts.get() + begins[i] * size, begins[i + 1] - begins[i], buffer.get());
  }
}

}  // namespace

void launch_attention(const AttentionArgs& a, int64_t sequences) {
  const Kernels& table = kernels();
  const int64_t most = table.attention_tile_rows(a);
  std::vector<AttentionTile> tiles;
  for (int64_t s = 0; s < sequences; ++s) {
    const int32_t queries = a.query_starts[s + 1] - a.query_starts[s];
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      for (int32_t begin = 0; begin < queries; begin += static_cast<int32_t>(most)) {
        const int32_t end = std::min<int32_t>(queries, begin + static_cast<int32_t>(most));
        tiles.push_back({static_cast<int32_t>(s), head, begin, end});
      }
    }
  }
  const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
  if (threads > 1 && static_cast<int64_t>(tiles.size()) < 4 * threads) {
    const auto long_one = [&](const AttentionTile& tile) { return table.attention_splits(a, tile).count > 1; };
    if (std::any_of(tiles.begin(), tiles.end(), long_one)) return launch_split(a, tiles);
  }
  const int64_t scratch = table.attention_scratch(a);
  const int64_t count = static_cast<int64_t>(tiles.size());
  for_each_neighbour_of(count, [&] {
    return [&, buffer = std::make_shared<Scratch>(scratch)](int64_t i) {
      table.attention(a, tiles[i], i + 1 < count ? &tiles[i + 1] : nullptr, buffer->get());
    };
  });
}

namespace {

Tensor packed_attention(const Tensor q, const Tensor k, const Tensor v, const Tensor starts, bool causal, double scale,
                        int64_t window_left, int64_t window_right, double softcap, const std::optional<Tensor> sinks) {
  check_queries(q, k, v, 1);
  const int64_t rows = q.size(0);
  check_packed_rows(q, k, v);
  check_starts(starts, "starts", rows);
  Tensor out = empty_cpu({rows, q.size(1), v.size(2)}, q.scalar_type());
  AttentionArgs a = common(q, k, v, out, 1, causal, scale, window_left, window_right, softcap, sinks);
  a.query_starts = starts.const_data_ptr<int32_t>();
  launch_attention(a, starts.size(0) - 1);
  return out;
}

void check_pages(const AttentionArgs& a, int64_t sequences, int64_t blocks, int64_t table_width) {
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t keys = a.kv_lengths[s], queries = a.query_starts[s + 1] - a.query_starts[s];
    require(keys >= queries, "kv_lengths: sequence ", s, " has ", queries, " query rows but ", keys, " keys");
    const int64_t used = (keys + a.block_size - 1) / a.block_size;
    require(used <= table_width, "block_tables: sequence ", s, " needs ", used, " blocks, the table is ", table_width,
            " wide");
    for (int64_t i = 0; i < used; ++i) {
      const int64_t block = a.block_tables[s * a.table_stride + i];
      require(block >= 0 && block < blocks, "block_tables: entry [", s, ", ", i, "] is ", block, ", outside the ",
              blocks, " blocks of the cache");
    }
  }
}

}  // namespace

Tensor paged_attention(const Tensor q, const Tensor k_cache, const Tensor v_cache, const Tensor query_starts,
                       const Tensor kv_lengths, const Tensor block_tables, bool causal, double scale,
                       int64_t window_left, double softcap, const std::optional<Tensor> sinks) {
  check_queries(q, k_cache, v_cache, 2);
  check_same_blocks(k_cache, v_cache);
  check_starts(query_starts, "query_starts", q.size(0));
  const int64_t sequences = query_starts.size(0) - 1;
  check_array(kv_lengths, "kv_lengths", ScalarType::Int, {sequences});
  check_array(block_tables, "block_tables", ScalarType::Int, {sequences, -1});
  Tensor out = empty_cpu({q.size(0), q.size(1), v_cache.size(3)}, q.scalar_type());
  AttentionArgs a = common(q, k_cache, v_cache, out, 2, causal, scale, window_left, -1, softcap, sinks);
  a.k_block = k_cache.stride(0), a.v_block = v_cache.stride(0);
  a.query_starts = query_starts.const_data_ptr<int32_t>();
  a.kv_lengths = kv_lengths.const_data_ptr<int32_t>();
  a.block_tables = block_tables.const_data_ptr<int32_t>();
  a.table_stride = block_tables.size(1), a.block_size = k_cache.size(1);
  check_block_size(k_cache);
  check_pages(a, sequences, k_cache.size(0), block_tables.size(1));
  launch_attention(a, sequences);
  return out;
}

}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("packed_attention", TORCH_BOX(&pyruntime::packed_attention));
  m.impl("paged_attention", TORCH_BOX(&pyruntime::paged_attention));
}
