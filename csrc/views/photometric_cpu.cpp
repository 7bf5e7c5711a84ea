// The photometric operations on the CPU: turns columns into a plan and chooses the instruction set.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "photometric.h"
#include "photometric_plan.h"
#include "simd_portable.h"
// This must follow the vector layer.
#include "photometric_kernel.h"

namespace fastcssl::views {

void run_portable(const Plan& plan, const std::uint8_t* crop, void* out, void* scratch) {
  run(plan, crop, out, scratch);
}

namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  Runner runner;
};

const Isa kIsas[] = {
    {"avx512", has_avx512, run_avx512}, {"avx2", has_avx2, run_avx2}, {"portable", [] { return true; }, run_portable}};

const Isa* best_isa() {
  for (const Isa& isa : kIsas) {
    if (isa.runs_here()) return &isa;
  }
  return nullptr;
}

std::atomic<const Isa*>& chosen_isa() {
  static std::atomic<const Isa*> isa{best_isa()};
  return isa;
}

// Computes the weights of the blur. Omits outer taps that together weigh less than 1e-5, which is at most 0.003 grey
// levels. The radius is made odd, so that taps come in pairs.
void plan_blur(float sigma, Plan& plan) {
  if (!(sigma > 0.0f)) return;
  const int widest = static_cast<int>(std::min(std::ceil(5.5f * sigma), static_cast<float>(kMaxRadius)));
  double weights[kMaxRadius + 1] = {};
  double total = 0.0;
  for (int k = 0; k <= widest; ++k) {
    const double distance = k / static_cast<double>(sigma);
    weights[k] = std::exp(-0.5 * distance * distance);
    total += k == 0 ? weights[k] : 2.0 * weights[k];
  }
  int radius = widest;
  for (double dropped = 0.0; radius > 0; --radius) {
    dropped += 2.0 * weights[radius] / total;
    if (dropped > 1e-5) break;
  }
  if (radius == 0) return;
  if (radius % 2 == 0) ++radius;
  plan.num_pairs = (radius + 1) / 2;
  total = weights[0];
  for (int k = 1; k <= radius; ++k) total += 2.0 * weights[k];
  // The centre absorbs the rounding of the other weights, so that the sum is exact and flat areas do not change. It
  // must stay below 1/2, which int16 cannot hold.
  constexpr int kHalf = 1 << (kWeightBits - 1);
  int so_far = 0;
  for (int k = 1; k <= radius; ++k) {
    plan.weights[k] = static_cast<std::int16_t>(std::lround(weights[k] / total * 2 * kHalf));
    so_far += plan.weights[k];
  }
  if (so_far == 0) plan.weights[1] = 1, so_far = 1;
  plan.weights[0] = static_cast<std::int16_t>(kHalf - so_far);
}

Plan make_plan(int height, int width, const float* columns, const Normalisation& normalisation, OutType type) {
  Plan plan;
  plan.height = height, plan.width = width, plan.type = type;
  plan.flip = columns[kFlip] != 0.0f;
  plan.gray = columns[kGray] != 0.0f;
  plan.threshold = columns[kSolarize];
  plan.solarize = plan.threshold <= 255.0f;
  plan.brightness = columns[kBrightness];
  plan.contrast = columns[kContrast];
  plan.saturation = columns[kSaturation];
  plan.hue = 6.0f * columns[kHue];
  // Written so that NaN also gives a valid order.
  const int order = columns[kOrder] > 0.0f ? static_cast<int>(std::min(columns[kOrder], 23.0f)) : 0;
  const bool neutral[4] = {plan.brightness == 1.0f, plan.contrast == 1.0f, plan.saturation == 1.0f, plan.hue == 0.0f};
  for (const std::uint8_t op : kOrders[order]) {
    if (neutral[op]) continue;
    if (op == kOpContrast) plan.contrast_at = plan.num_ops;
    plan.ops[plan.num_ops++] = op;
  }
  plan_blur(columns[kSigma], plan);
  for (int c = 0; c < 3; ++c) {
    plan.scale[c] = 1.0f / (255.0f * normalisation.std[c]);
    plan.bias[c] = -normalisation.mean[c] / normalisation.std[c];
  }
  return plan;
}

}  // namespace

std::size_t photometric_scratch_bytes(int, int width) {
  return (kRingRows * ring_stride(width) + kGroupRows * 3 * wide_plane(width)) * sizeof(std::int16_t);
}

void photometric_image(const std::uint8_t* crop, int height, int width, const float* columns,
                       const Normalisation& normalisation, OutType type, void* out, void* scratch) {
  const Plan plan = make_plan(height, width, columns, normalisation, type);
  chosen_isa().load(std::memory_order_relaxed)->runner(plan, crop, out, scratch);
}

const char* photometric_isa() { return chosen_isa().load(std::memory_order_relaxed)->name; }

bool photometric_force_isa(const char* name) {
  if (name == nullptr) {
    chosen_isa() = best_isa();
    return true;
  }
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.name, name) != 0 || !isa.runs_here()) continue;
    chosen_isa() = &isa;
    return true;
  }
  return false;
}

}  // namespace fastcssl::views
