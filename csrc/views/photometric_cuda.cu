// The photometric operations on the GPU, in three launches over the batch:
//   sum_grey        partial sums of the mean grey, only for images with contrast
//   color_image     images without blur: each block processes a run of pixels
//   blur_image      images with blur: each block processes a strip of columns, eight rows at a time
// Only the device knows what an image needs. Therefore the last two launches both cover the whole batch, and blocks
// return immediately for images of the other launch. Every sum has a fixed order, so the same input gives the same bits
// on one architecture. The code allocates nothing and does not wait for the device, so a CUDA graph can capture it.
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "../launch.cuh"
#include "photometric.h"
#include "photometric_batch.cuh"
#include "photometric_blur.cuh"
#include "photometric_color.cuh"
#include "photometric_store.cuh"

namespace fastcssl::views {
namespace {

using namespace gpu;
using device::Failure;

constexpr int kMaxGridY = 65535;
constexpr int kBatch = 4;  // pixels that a thread processes at a time

constexpr int kRunThreads = 256;
constexpr int kRunPixels = kRunThreads * kBatch;
constexpr int kMaxSums = kWarp;  // partial sums per image, few enough for one warp to add them up
constexpr int kMinSumPixels = 2 * kRunPixels;

// A block of the blur processes three channels of a strip of kStripColumns, kStepRows at a time. A thread handles one
// of 8 rows x 24 columns when pixels are read, a run of kOutputs columns in the horizontal pass, and one column in the
// vertical pass.
constexpr int kStripColumns = 64;
constexpr int kStepRows = 8;
constexpr int kBlurThreads = 3 * kStripColumns;
constexpr int kReaders = kBlurThreads / kStepRows;
constexpr int kRingRows = kStepRows + 2 * kMaxRadius;
// One more than a multiple of 8, so that the 8 rows x 4 runs of a warp use 32 different memory banks.
constexpr int kSpanPitch = kStripColumns + 2 * kMaxRadius + 3;
constexpr int kRingPitch = kStripColumns + 1;
constexpr int kStagePitch = kStripColumns * 3 * static_cast<int>(sizeof(float)) + kVectorBytes;
static_assert(kSpanPitch % 8 == 1 && kRingPitch % 8 == 1, "bank conflicts");
static_assert(kStripColumns / kOutputs * kStepRows == kStripColumns, "one run of a row per thread");
static_assert(kReaders * kBatch >= kStripColumns + 2 * kMaxRadius, "one batch reads a whole span");
static_assert(kStagePitch % kVectorBytes == 0, "rows are staged aligned");
constexpr int kWantedBlocks = 2048;  // with fewer blocks, strips are cut into segments to fill the device
constexpr int kMinSegmentRows = 32;  // each segment begins with 2 * radius rows that produce no output

struct SumShared {
  float warp_sums[kRunThreads / kWarp];
};

struct RunShared {
  alignas(kVectorBytes) unsigned char stage[kRunPixels * 3 * sizeof(float) + kVectorBytes];
};

// 32 kB, so three blocks fit on an SM with 100 kB. The staged output reuses the memory of the rows it was made from.
struct BlurShared {
  alignas(kVectorBytes) float weights[2 * kMaxRadius + 2];  // from index 1, so that pairs after the first are aligned
  float ring[3][kRingRows][kRingPitch];                     // rows after the horizontal pass
  union {
    float rows[3][kStepRows][kSpanPitch];
    alignas(kVectorBytes) unsigned char stage[kStepRows][kStagePitch];
  };
};

__global__ void __launch_bounds__(kRunThreads) sum_grey(Crops crops) {
  const int image = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const Jitter jitter = load_jitter(crops.columns + static_cast<std::int64_t>(image) * kNumColumns);
  if (!has_contrast(jitter.operations)) return;
  FASTCSSL_SHARED(SumShared, shared);
  const unsigned operations = before_contrast(jitter.operations);
  const std::uint8_t* pixels = crops.image(image);
  const int begin = static_cast<int>(blockIdx.x) * crops.sum_pixels;
  const int count = min(crops.sum_pixels, crops.height * crops.width - begin);
  float sum = 0.0f;
  for (int first = thread; first < count; first += kRunPixels) {
    unsigned packed[kBatch];
    Pixel batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + i * kRunThreads;
      packed[i] = at < count ? load_rgb(pixels + static_cast<std::int64_t>(begin + at) * 3) : 0u;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = unpack(packed[i]);
    apply_jitter(batch, jitter, operations);
    // Pixels past the end are black, and the operations before contrast keep them black.
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += grey_of(batch[i]);
  }
  sum = warp_sum(sum);
  if (thread % kWarp == 0) shared.warp_sums[thread / kWarp] = sum;
  __syncthreads();
  if (thread < kWarp) {
    sum = warp_sum(thread < kRunThreads / kWarp ? shared.warp_sums[thread] : 0.0f);
    if (thread == 0) crops.sums[static_cast<std::int64_t>(image) * crops.num_sums + blockIdx.x] = sum;
  }
}

template <typename T>
__global__ void __launch_bounds__(kRunThreads) color_image(Crops crops, Divider by_width, Affine affine, T* out) {
  const int image = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const float* columns = crops.columns + static_cast<std::int64_t>(image) * kNumColumns;
  if (__ldg(columns + kSigma) > 0.0f) return;
  FASTCSSL_SHARED(RunShared, shared);
  const int num_pixels = crops.height * crops.width;
  const int begin = static_cast<int>(blockIdx.x) * kRunPixels;
  const int count = min(kRunPixels, num_pixels - begin);
  const bool flip = __ldg(columns + kFlip) != 0.0f;
  const std::uint8_t* pixels = crops.image(image);
  unsigned packed[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    int at = begin + thread + i * kRunThreads;
    const bool inside = at < begin + count;
    if (flip) {
      const int row = static_cast<int>(by_width(static_cast<unsigned>(at)));
      at = (2 * row + 1) * crops.width - 1 - at;
    }
    packed[i] = inside ? load_rgb(pixels + static_cast<std::int64_t>(at) * 3) : 0u;
  }
  const Jitter jitter = load_jitter_and_mean(crops, image);
  Pixel batch[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) batch[i] = unpack(packed[i]);
  apply_jitter(batch, jitter, jitter.operations);
  if (__ldg(columns + kGray) != 0.0f) make_grey(batch);

  T* destination = out + (static_cast<std::int64_t>(image) * num_pixels + begin) * 3;
  T* staged = staging_place(shared.stage, destination);
  const float solarize = load_solarize(columns);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    T* pixel = staged + (thread + i * kRunThreads) * 3;
    convert(finish(batch[i].r, solarize, affine.scale[0], affine.shift[0]), pixel);
    convert(finish(batch[i].g, solarize, affine.scale[1], affine.shift[1]), pixel + 1);
    convert(finish(batch[i].b, solarize, affine.scale[2], affine.shift[2]), pixel + 2);
  }
  __syncthreads();
  copy_run(destination, staged, count * 3, thread, kRunThreads);
}

// Mirrors a position without repeating the edge, several times if the blur reaches beyond the whole image.
__device__ inline int mirror(int at, int size) {
  if (size == 1) return 0;
  while (at < 0 || at >= size) at = at < 0 ? -at : 2 * (size - 1) - at;
  return at;
}

// Divides the columns of `width` into equal strips and the rows of `height` into equal segments.
struct Cut {
  int strip_columns, num_strips, segment_rows, num_segments;
};

template <typename T>
__global__ void __launch_bounds__(kBlurThreads) blur_image(Crops crops, Cut cut, Affine affine, T* out) {
  const int image = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const float* columns = crops.columns + static_cast<std::int64_t>(image) * kNumColumns;
  const float sigma = __ldg(columns + kSigma);
  if (!(sigma > 0.0f)) return;
  FASTCSSL_SHARED(BlurShared, shared);
  const int radius = radius_of(sigma);
  if (thread < kWarp) make_weights(shared.weights, sigma, radius, thread);
  const int left = static_cast<int>(blockIdx.x) % cut.num_strips * cut.strip_columns;
  const int top = static_cast<int>(blockIdx.x) / cut.num_strips * cut.segment_rows;
  const int num_columns = min(cut.strip_columns, crops.width - left);
  const int num_rows = min(cut.segment_rows, crops.height - top);
  const int span = num_columns + 2 * radius;
  const int num_filtered = num_rows + 2 * radius;

  const int step_row = thread / kReaders, reader = thread % kReaders;
  const int channel = thread / kStripColumns, column = thread % kStripColumns;
  const int run_row = column % kStepRows, run = column / kStepRows * kOutputs;

  // The columns that this thread reads, the same in every row; -1 beyond the span.
  int from[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int at = reader + i * kReaders;
    from[i] = at < span ? mirror(left - radius + at, crops.width) * 3 : -1;
  }
  const std::uint8_t* pixels = crops.image(image);
  unsigned packed[kBatch];
  const auto read_step = [&](int first) {
    if (first + step_row >= num_filtered) return;
    const std::int64_t row = mirror(top - radius + first + step_row, crops.height);
    const std::uint8_t* line = pixels + row * crops.width * 3;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) packed[i] = from[i] >= 0 ? load_rgb(line + from[i]) : 0u;
  };
  read_step(0);

  const Jitter jitter = load_jitter_and_mean(crops, image);
  const bool grey = __ldg(columns + kGray) != 0.0f, flip = __ldg(columns + kFlip) != 0.0f;
  const float solarize = load_solarize(columns);
  const int out_left = flip ? crops.width - left - num_columns : left;
  T* out_image = out + static_cast<std::int64_t>(image) * crops.height * crops.width * 3;
  int ring_first = 0;  // the position of row `first` in the ring

  for (int first = 0; first < num_filtered; first += kStepRows) {
    if (first + step_row < num_filtered) {
      Pixel batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) batch[i] = unpack(packed[i]);
      apply_jitter(batch, jitter, jitter.operations);
      if (grey) make_grey(batch);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = reader + i * kReaders;
        if (at >= span) continue;
        shared.rows[0][step_row][at] = batch[i].r;
        shared.rows[1][step_row][at] = batch[i].g;
        shared.rows[2][step_row][at] = batch[i].b;
      }
    }
    __syncthreads();  // the rows are complete

    float filtered[kOutputs];
    if (run < num_columns) {
      filter(RowReader{&shared.rows[channel][run_row][run]}, shared.weights, radius, filtered);
      const int row = ring_first + run_row;
      float* ring = &shared.ring[channel][row < kRingRows ? row : row - kRingRows][run];
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) ring[j] = filtered[j];
    }
    __syncthreads();               // the ring is complete, and the stage may overwrite the rows
    read_step(first + kStepRows);  // starts loading while these rows are finished

    // Output row y needs the filtered rows y .. y + 2 radius. Some of the eight rows are incomplete at the start and do
    // not exist at the end. They are computed from arbitrary values and dropped.
    const int out_first = first - 2 * radius;
    if (out_first + kStepRows > 0) {
      if (column < num_columns) {
        const int row = ring_first - 2 * radius;
        const RingReader<kRingRows, kRingPitch> ring{&shared.ring[channel][0][column], row < 0 ? row + kRingRows : row};
        filter(ring, shared.weights, radius, filtered);
        const int element = (flip ? num_columns - 1 - column : column) * 3 + channel;
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) {
          const int y = out_first + j;
          if (y < 0 || y >= num_rows) continue;
          T* destination = out_image + (static_cast<std::int64_t>(top + y) * crops.width + out_left) * 3;
          convert(finish(filtered[j], solarize, affine.scale[channel], affine.shift[channel]),
                  staging_place(shared.stage[j], destination) + element);
        }
      }
      __syncthreads();  // the stage is complete
      const int y = out_first + step_row;
      if (y >= 0 && y < num_rows) {
        T* destination = out_image + (static_cast<std::int64_t>(top + y) * crops.width + out_left) * 3;
        copy_run(destination, staging_place(shared.stage[step_row], destination), num_columns * 3, reader, kReaders);
      }
      __syncthreads();  // the rows may overwrite the stage
    }
    ring_first = ring_first + kStepRows < kRingRows ? ring_first + kStepRows : ring_first + kStepRows - kRingRows;
  }
}

int divide_up(int value, int by) { return static_cast<int>((static_cast<std::int64_t>(value) + by - 1) / by); }
int round_up(int value, int to) { return divide_up(value, to) * to; }

int sum_pixels_of(int num_pixels) {
  return std::max(kMinSumPixels, round_up(divide_up(num_pixels, kMaxSums), kRunPixels));
}

Cut cut_image(int num_images, int height, int width) {
  Cut cut;
  cut.num_strips = divide_up(width, kStripColumns);
  cut.strip_columns = std::min(kStripColumns, round_up(divide_up(width, cut.num_strips), kOutputs));
  cut.num_strips = divide_up(width, cut.strip_columns);
  const std::int64_t num_blocks = static_cast<std::int64_t>(num_images) * cut.num_strips;
  const int wanted = static_cast<int>((kWantedBlocks + num_blocks - 1) / num_blocks);
  cut.num_segments = std::min(wanted, divide_up(height, kMinSegmentRows));
  cut.segment_rows = round_up(divide_up(height, cut.num_segments), kStepRows);
  cut.num_segments = divide_up(height, cut.segment_rows);
  return cut;
}

template <typename T>
Failure launch_all(const Crops& crops, int num_images, const Affine& affine, T* out, cudaStream_t stream) {
  const int num_pixels = crops.height * crops.width;
  const unsigned images = static_cast<unsigned>(num_images);
  const dim3 sum_grid(static_cast<unsigned>(crops.num_sums), images);
  FASTCSSL_LAUNCH(sum_grey, sum_grid, kRunThreads, 0, stream, crops);
  if (const Failure failure = launched("sum_grey")) return failure;
  const dim3 color_grid(static_cast<unsigned>(divide_up(num_pixels, kRunPixels)), images);
  FASTCSSL_LAUNCH(color_image<T>, color_grid, kRunThreads, 0, stream, crops, Divider(crops.width), affine, out);
  if (const Failure failure = launched("color_image")) return failure;
  const Cut cut = cut_image(num_images, crops.height, crops.width);
  const dim3 blur_grid(static_cast<unsigned>(cut.num_strips) * static_cast<unsigned>(cut.num_segments), images);
  FASTCSSL_LAUNCH(blur_image<T>, blur_grid, kBlurThreads, 0, stream, crops, cut, affine, out);
  return launched("blur_image");
}

// A grid has at most 65,535 rows of blocks, with one row per image, so larger batches need several launches.
template <typename T>
Failure launch_in_parts(Crops crops, int num_images, const Affine& affine, T* out, cudaStream_t stream) {
  const std::int64_t image_values = static_cast<std::int64_t>(crops.height) * crops.width * 3;
  for (int first = 0; first < num_images; first += kMaxGridY) {
    const int count = std::min(kMaxGridY, num_images - first);
    if (const Failure failure = launch_all(crops, count, affine, out, stream)) return failure;
    crops.pixels += image_values * count;
    crops.columns += static_cast<std::int64_t>(kNumColumns) * count;
    crops.sums += static_cast<std::int64_t>(crops.num_sums) * count;
    out += image_values * count;
  }
  return {};
}

// Offsets inside an image have 32 bits; offsets of images have 64.
bool supported(int num_images, int height, int width) {
  return num_images >= 0 && height > 0 && width > 0 &&
         static_cast<std::int64_t>(height) * width <= INT_MAX / 3 - kRunPixels;
}

}  // namespace

std::size_t photometric_cuda_workspace_bytes(int num_images, int height, int width) {
  if (num_images == 0 || !supported(num_images, height, width)) return 0;
  const int num_pixels = height * width;
  return sizeof(float) * static_cast<std::size_t>(num_images) * divide_up(num_pixels, sum_pixels_of(num_pixels));
}

Failure photometric_cuda(const std::uint8_t* crops, int num_images, int height, int width, const float* columns,
                         const Normalisation& normalisation, OutType type, void* out, void* workspace, void* stream) {
  const Failure refused{cudaErrorInvalidValue, "sum_grey before its launch"};
  if (num_images == 0) return {};
  if (!supported(num_images, height, width)) return refused;
  const int sum_pixels = sum_pixels_of(height * width);
  const int num_sums = divide_up(height * width, sum_pixels);
  const Crops batch{crops, columns, static_cast<float*>(workspace), height, width, num_sums, sum_pixels};
  Affine affine;
  for (int i = 0; i < 3; ++i) {
    affine.scale[i] = static_cast<float>(1.0 / normalisation.std[i]);
    affine.shift[i] = static_cast<float>(-static_cast<double>(normalisation.mean[i]) / normalisation.std[i]);
  }
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  switch (type) {
    case OutType::float32:
      return launch_in_parts(batch, num_images, affine, static_cast<float*>(out), queue);
    case OutType::bfloat16:
      return launch_in_parts(batch, num_images, affine, static_cast<__nv_bfloat16*>(out), queue);
    case OutType::float16:
      return launch_in_parts(batch, num_images, affine, static_cast<__half*>(out), queue);
  }
  return refused;
}

}  // namespace fastcssl::views
