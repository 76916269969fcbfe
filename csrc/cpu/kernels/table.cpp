// The table of one instruction set.
#include "kernels.h"

namespace pyruntime::PYRUNTIME_ISA {

int64_t attention_tile_rows(const AttentionArgs& args);
int64_t attention_scratch(const AttentionArgs& args);
void attention(const AttentionArgs& args, const AttentionTile& tile, float* scratch);
void linear(const LinearArgs& args, int64_t begin, int64_t end);
void logsumexp(const LogSumExpArgs& args, int64_t begin, int64_t end, float* maxima, float* sums);
void labels(const LabelArgs& args, int64_t row);
void pool(const PoolArgs& args, int64_t sequence);
void sample(const SampleArgs& args, int64_t row, float* scratch);

#define NAME_OF(isa) #isa
#define NAME(isa) NAME_OF(isa)
extern const Kernels table;
const Kernels table = {
    NAME(PYRUNTIME_ISA), attention_tile_rows, attention_scratch, attention, linear, logsumexp, labels, pool, sample};

}  // namespace pyruntime::PYRUNTIME_ISA
