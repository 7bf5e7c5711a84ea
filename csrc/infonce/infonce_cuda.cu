// InfoNCE and its rings on the GPU. A call launches
//   sweep_banks     for each type of bank: partial sums of each row over a share of the keys
//   combine_splits  computes losses and gradients from the partial sums and the positives
// and, if keys are enqueued, write_keys and move_pointers. Every sum has a fixed order, so the same input gives the
// same bits on one architecture. Only the device knows how much of a ring is filled and where the next key goes. The
// code allocates nothing and does not wait for the device, so a CUDA graph can capture it.
#include "infonce.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "../launch.cuh"
#include "infonce_combine.cuh"
#include "infonce_enqueue.cuh"
#include "infonce_sweep.cuh"
#include "infonce_tiles.h"

namespace fastcssl::infonce {
namespace {

using namespace gpu;
using device::Failure;

constexpr int kMaxGridY = 65535;
constexpr int kMinSplitTiles = 4;        // a smaller split costs more to combine than it saves
constexpr double kEnoughOfWaves = 0.95;  // share of the best possible use of the multiprocessors that is good enough

std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

using SweepKernel = void (*)(Sweep);

// One launch: some banks of one type, the kernel for them, and the number of splits.
struct Launch {
  SweepKernel kernel = nullptr;
  Tile tile{};
  std::size_t shared_bytes = 0;
  int num_splits = 0;
  int num_banks = 0;
  int banks[kMaxBanks] = {};
};

template <typename T, bool kExact, int kDim, bool kFew>
void choose(Launch& launch) {
  launch.kernel = sweep_banks<T, kExact, kDim, kFew>;
  launch.tile = SweepBlock<T, kExact, kDim, kFew>::kTile;
  launch.shared_bytes = SweepBlock<T, kExact, kDim, kFew>::kSharedBytes;
}

template <typename T, bool kExact, bool kFew>
void choose_dim(Launch& launch, int dim) {
  switch (padded_dim(dim)) {
    case 64:
      return choose<T, kExact, 64, kFew>(launch);
    case 128:
      return choose<T, kExact, 128, kFew>(launch);
    default:
      return choose<T, kExact, 256, false>(launch);
  }
}

void choose_kernel(Launch& launch, Type type, Precision precision, const Rows& rows) {
  const bool exact = precision == Precision::tf32x3, few = rows.num_rows <= kFewRows;
  switch (type) {
    case Type::float32:
      if (exact) return choose_dim<float, true, false>(launch, rows.dim);
      return choose_dim<float, false, false>(launch, rows.dim);
    case Type::float16:
      if (exact) return choose_dim<__half, true, false>(launch, rows.dim);
      if (few) return choose_dim<__half, false, true>(launch, rows.dim);
      return choose_dim<__half, false, false>(launch, rows.dim);
    case Type::bfloat16:
      if (exact) return choose_dim<__nv_bfloat16, true, false>(launch, rows.dim);
      if (few) return choose_dim<__nv_bfloat16, false, true>(launch, rows.dim);
      return choose_dim<__nv_bfloat16, false, false>(launch, rows.dim);
  }
}

// Returns the fewest splits that use the device's multiprocessors, wave by wave, about as well as any number of splits.
int best_splits(std::int64_t row_blocks, std::int64_t slots, std::int64_t least, std::int64_t most) {
  const auto filling = [&](std::int64_t splits) {
    const std::int64_t blocks = row_blocks * splits;
    return static_cast<double>(blocks) / static_cast<double>(divide_up(blocks, slots) * slots);
  };
  double best = 0.0;
  for (std::int64_t splits = least; splits <= most; ++splits) best = std::max(best, filling(splits));
  std::int64_t chosen = least;
  while (chosen < most && filling(chosen) < kEnoughOfWaves * best) ++chosen;
  return static_cast<int>(chosen);
}

struct Plan {
  static constexpr int kMaxLaunches = 16;
  Launch launches[kMaxLaunches];
  int num_launches = 0;
  std::int64_t all_splits = 0;
};

// Makes the plan for the workspace and for the launches. It depends only on the shapes and on the current device.
cudaError_t make_plan(const Rows& rows, const Bank* banks, int num_banks, Precision precision, Plan& plan) {
  if (!infonce_cuda_takes(rows.dim) || rows.num_rows < 0 || rows.num_rows > INT_MAX || num_banks < 0) {
    return cudaErrorInvalidValue;
  }
  const bool exact = precision == Precision::tf32x3;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  for (Type type : {Type::float32, Type::float16, Type::bfloat16}) {
    int next = 0;
    while (next < num_banks) {
      Launch launch;
      choose_kernel(launch, type, precision, rows);
      std::int64_t num_keys = 0, num_tiles = 0;
      for (; next < num_banks && launch.num_banks < kMaxBanks; ++next) {
        const Bank& bank = banks[next];
        if (bank.num_rows < 0) return cudaErrorInvalidValue;
        if (bank.type != type || bank.num_rows == 0) continue;
        if (reinterpret_cast<std::uintptr_t>(bank.rows_KD) % kChunkBytes != 0) return cudaErrorMisalignedAddress;
        launch.banks[launch.num_banks++] = next;
        num_keys += bank.num_rows;
        num_tiles += divide_up(bank.num_rows, launch.tile.keys);
      }
      if (launch.num_banks == 0) break;
      if (plan.num_launches == Plan::kMaxLaunches) return cudaErrorInvalidValue;
      error = cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(launch.shared_bytes));
      if (error != cudaSuccess) return error;
      int blocks = 0;
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, launch.kernel, launch.tile.threads(),
                                                            launch.shared_bytes);
      if (error != cudaSuccess) return error;
      const std::int64_t slots = static_cast<std::int64_t>(multiprocessors) * std::max(blocks, 1);
      const std::int64_t row_blocks = std::max<std::int64_t>(1, divide_up(rows.num_rows, launch.tile.rows()));
      const int split_keys = max_split_keys(exact, padded_dim(rows.dim));
      const std::int64_t least = std::min<std::int64_t>(divide_up(num_keys, split_keys), kMaxGridY);
      const std::int64_t most = std::min<std::int64_t>({divide_up(num_tiles, kMinSplitTiles), slots, kMaxGridY});
      launch.num_splits = best_splits(row_blocks, slots, least, std::max(least, most));
      plan.all_splits += launch.num_splits;
      plan.launches[plan.num_launches++] = launch;
    }
  }
  return plan.all_splits <= INT_MAX ? cudaSuccess : cudaErrorInvalidValue;
}

std::size_t sums_bytes(const Plan& plan, const Rows& rows) {
  return sizeof(float) * static_cast<std::size_t>(plan.all_splits) * static_cast<std::size_t>(rows.num_rows) *
         static_cast<std::size_t>(rows.dim);
}

}  // namespace

bool infonce_cuda_takes(int dim) { return dim >= 8 && dim <= kMaxDim && dim % 8 == 0; }

std::size_t infonce_cuda_workspace_bytes(const Rows& rows, const Bank* banks, int num_banks, Precision precision) {
  Plan plan;
  if (make_plan(rows, banks, num_banks, precision, plan) != cudaSuccess) return 0;
  return sums_bytes(plan, rows) + sizeof(float2) * static_cast<std::size_t>(plan.all_splits * rows.num_rows);
}

Failure infonce_cuda(const Rows& rows, const Bank* banks, int num_banks, Precision precision, const Result& result,
                     void* workspace, void* stream) {
  if (rows.num_rows == 0) return {};
  Plan plan;
  if (const cudaError_t error = make_plan(rows, banks, num_banks, precision, plan)) {
    return {error, "sweep_banks before its launch"};
  }
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  float* const sums_SMD = static_cast<float*>(workspace);
  float2* const weights_MS = reinterpret_cast<float2*>(static_cast<unsigned char*>(workspace) + sums_bytes(plan, rows));
  int first_split = 0;
  for (int i = 0; i < plan.num_launches; ++i) {
    const Launch& launch = plan.launches[i];
    Sweep sweep{};
    sweep.scaled_MD = rows.scaled_MD;
    sweep.own_M = rows.own_M;
    sweep.num_rows = rows.num_rows;
    sweep.dim = rows.dim;
    sweep.num_banks = launch.num_banks;
    sweep.sums_SMD = sums_SMD;
    sweep.weights_MS = weights_MS;
    sweep.num_splits = launch.num_splits;
    sweep.first_split = first_split;
    sweep.all_splits = static_cast<int>(plan.all_splits);
    for (int b = 0; b < launch.num_banks; ++b) {
      const Bank& bank = banks[launch.banks[b]];
      sweep.banks[b] = {static_cast<const unsigned char*>(bank.rows_KD), bank.num_rows, bank.filled};
    }
    first_split += launch.num_splits;
    // Row blocks are neighbours in the grid, so blocks that run together read the same keys from memory only once.
    const dim3 grid(static_cast<unsigned>(divide_up(rows.num_rows, launch.tile.rows())),
                    static_cast<unsigned>(launch.num_splits));
    const unsigned threads = static_cast<unsigned>(launch.tile.threads());
    FASTCSSL_LAUNCH(launch.kernel, grid, threads, launch.shared_bytes, queue, sweep);
    if (const Failure failure = launched("sweep_banks")) return failure;
  }
  Combine combine{};
  combine.scaled_MD = rows.scaled_MD;
  combine.positive_MD = rows.positive_MD;
  combine.sums_SMD = sums_SMD;
  combine.weights_MS = weights_MS;
  combine.num_rows = rows.num_rows;
  combine.dim = rows.dim;
  combine.num_splits = static_cast<int>(plan.all_splits);
  combine.positive_in_denominator = rows.positive_in_denominator;
  combine.loss_M = result.loss_M;
  combine.by_scaled_MD = result.by_scaled_MD;
  combine.by_positive_MD = result.by_positive_MD;
  FASTCSSL_LAUNCH(combine_splits, static_cast<unsigned>(rows.num_rows), kCombineThreads, 0, queue, combine);
  return launched("combine_splits");
}

Failure enqueue_cuda(const Ring* rings, int num_rings, int dim, void* stream) {
  const Failure refused{cudaErrorInvalidValue, "write_keys before its launch"};
  if (num_rings < 0 || dim <= 0) return refused;
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  for (int first = 0; first < num_rings; first += kMaxBanks) {
    Rings part{};
    part.count = std::min(kMaxBanks, num_rings - first);
    std::int64_t most_keys = 0;
    for (int i = 0; i < part.count; ++i) {
      const Ring& ring = part.rings[i] = rings[first + i];
      if (ring.num_rows < 0 || ring.num_keys < 0) return refused;
      most_keys = std::max(most_keys, std::min(ring.num_keys, ring.num_rows));
    }
    if (most_keys == 0) continue;
    const std::int64_t num_blocks = divide_up(most_keys, kEnqueueWarps);
    if (num_blocks > INT_MAX) return refused;
    const dim3 grid(static_cast<unsigned>(num_blocks), static_cast<unsigned>(part.count));
    FASTCSSL_LAUNCH(write_keys, grid, kEnqueueThreads, 0, queue, part, dim);
    if (const Failure failure = launched("write_keys")) return failure;
    FASTCSSL_LAUNCH(move_pointers, 1, kWarp, 0, queue, part);
    if (const Failure failure = launched("move_pointers")) return failure;
  }
  return {};
}

}  // namespace fastcssl::infonce
