// The table of one instruction set.
#include "kernels.h"

namespace pyruntime::PYRUNTIME_ISA {

int64_t attention_tile_rows(const AttentionArgs& args);
int64_t attention_scratch(const AttentionArgs& args);
void attention(const AttentionArgs& args, const AttentionTile& tile, const AttentionTile* after, float* scratch);
int64_t attention_part(const AttentionArgs& args);
KeySplits attention_splits(const AttentionArgs& args, const AttentionTile& tile);
void attention_split(const AttentionArgs& args, const AttentionTile& tile, int64_t split, float* scratch, float* part);
void attention_join(const AttentionArgs& args, const AttentionTile& tile, const float* parts, int64_t count,
                    float* scratch);
void linear(const LinearArgs& args, int64_t begin, int64_t end);
void activate(const ActivateArgs& args);
int64_t panel_columns(const PanelArgs& args);
int64_t panel_words(const PanelArgs& args);
void panels(const PanelArgs& args, int64_t begin, int64_t end, uint32_t* panel);
void logsumexp(const LogSumExpArgs& args, int64_t begin, int64_t end, float* maxima, float* sums);
void labels(const LabelArgs& args, int64_t row);
void sparse(const SparseArgs& args, int64_t begin, int64_t end);
void linear_int8(const Int8Args& args, int64_t begin, int64_t end);
void quantize_rows(const QuantizeArgs& args, int64_t begin, int64_t end);
void screen_rows(const QuantizeArgs& args, int64_t begin, int64_t end, float* error_weights, float* length_weights);
void screen(const ScreenArgs& args, int64_t begin, int64_t end, float* least, float* scratch);
void screened(const ScreenArgs& args, int64_t begin, int64_t end, const float* wanted, uint16_t* masks);
void normalize_rows(const NormArgs& args, int64_t begin, int64_t end);
void rotate(const RotateArgs& args, int64_t begin, int64_t end);
void pool(const PoolArgs& args, int64_t sequence, int64_t begin, int64_t end);
void normalize(const PoolArgs& args, int64_t sequence);
int64_t sample_scratch(int64_t vocabulary);
void sample(const SampleArgs& args, int64_t row, float* scratch);

#define NAME_OF(isa) #isa
#define NAME(isa) NAME_OF(isa)
extern const Kernels table;
const Kernels table = {.name = NAME(PYRUNTIME_ISA),
                       .attention_tile_rows = attention_tile_rows,
                       .attention_scratch = attention_scratch,
                       .attention = attention,
                       .attention_part = attention_part,
                       .attention_splits = attention_splits,
                       .attention_split = attention_split,
                       .attention_join = attention_join,
                       .linear = linear,
                       .activate = activate,
                       .panel_columns = panel_columns,
                       .panel_words = panel_words,
                       .panels = panels,
                       .logsumexp = logsumexp,
                       .labels = labels,
                       .sparse = sparse,
                       .linear_int8 = linear_int8,
                       .quantize_rows = quantize_rows,
                       .screen_rows = screen_rows,
                       .screen = screen,
                       .screened = screened,
                       .normalize_rows = normalize_rows,
                       .rotate = rotate,
                       .pool = pool,
                       .normalize = normalize,
                       .sample_scratch = sample_scratch,
                       .sample = sample};

}  // namespace pyruntime::PYRUNTIME_ISA
