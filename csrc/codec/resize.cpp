#include "resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastcssl::codec {
namespace {

constexpr int kWeightBits = 14;
constexpr int kRound = 1 << (kWeightBits - 1);

// Keys and Pillow use a = -0.5; torch without anti-aliasing uses -0.75.
double bicubic(double x, double a) {
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
  return 0.0;
}

double kernel(double x, const Filter& filter) {
  x = std::fabs(x);
  if (filter.interpolation == Interpolation::bilinear) return x < 1.0 ? 1.0 - x : 0.0;
  return bicubic(x, filter.antialias ? -0.5 : -0.75);
}

std::uint8_t clip(int sum) { return static_cast<std::uint8_t>(std::clamp(sum >> kWeightBits, 0, 255)); }

// out[j] = sum over t of weight[t] * source[t * pitch + j], for whole rows of bytes.
void columns_portable(const std::uint8_t* source, std::size_t pitch, const std::int16_t* weight, int num_taps,
                      int num_bytes, std::uint8_t* out, int from = 0) {
  for (int j = from; j < num_bytes; ++j) {
    int sum = kRound;
    for (int t = 0; t < num_taps; ++t) sum += weight[t] * source[t * pitch + j];
    out[j] = clip(sum);
  }
}

void row_portable(const std::uint8_t* source, const Taps& taps, int source_width, int width, std::uint8_t* out,
                  int from = 0) {
  for (int x = from; x < width; ++x) {
    const int first = taps.first[x];
    const std::int16_t* weight = taps.weight.data() + static_cast<std::size_t>(x) * taps.stride;
    const int num_taps = std::min(taps.stride, source_width - first);
    int sum[3] = {kRound, kRound, kRound};
    for (int t = 0; t < num_taps; ++t)
      for (int c = 0; c < 3; ++c) sum[c] += weight[t] * source[(first + t) * 3 + c];
    for (int c = 0; c < 3; ++c) out[x * 3 + c] = clip(sum[c]);
  }
}

#if defined(__x86_64__)
constexpr int kMaxPairs = 32;  // pairs of taps, enough for shrinking by 16

__attribute__((target("avx2"))) void columns_avx2(const std::uint8_t* source, std::size_t pitch,
                                                  const std::int16_t* weight, int num_taps, int num_bytes,
                                                  std::uint8_t* out) {
  const int num_pairs = (num_taps + 1) / 2;
  if (num_pairs > kMaxPairs) return columns_portable(source, pitch, weight, num_taps, num_bytes, out);
  // Two rows at a time, interleaved, so that one multiply-add serves both. An odd last tap is paired with itself and 0.
  __m256i weights[kMaxPairs];
  const std::uint8_t* rows[2 * kMaxPairs];
  for (int p = 0; p < num_pairs; ++p) {
    const bool whole = 2 * p + 1 < num_taps;
    const std::uint32_t second = whole ? static_cast<std::uint16_t>(weight[2 * p + 1]) : 0;
    weights[p] = _mm256_set1_epi32(static_cast<int>(second << 16 | static_cast<std::uint16_t>(weight[2 * p])));
    rows[2 * p] = source + 2 * p * pitch;
    rows[2 * p + 1] = whole ? rows[2 * p] + pitch : rows[2 * p];
  }
  int j = 0;
  for (; j + 16 <= num_bytes; j += 16) {
    __m256i low = _mm256_set1_epi32(kRound), high = low;
    for (int p = 0; p < num_pairs; ++p) {
      const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[2 * p] + j)));
      const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[2 * p + 1] + j)));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), weights[p]));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), weights[p]));
    }
    const __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(low, kWeightBits), _mm256_srai_epi32(high, kWeightBits));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm256_castsi256_si128(bytes));
  }
  columns_portable(source, pitch, weight, num_taps, num_bytes, out, j);
}

// Returns red, green and blue of one output pixel, each as two partial sums. If kTaps > 0, it is the number of taps,
// known at compile time.
template <int kTaps>
__attribute__((target("avx2"))) inline __m256i pixel_avx2(const std::uint8_t* source, const std::int16_t* wide,
                                                          int num_taps) {
  // Four RGB pixels (12 of 16 loaded bytes) become, for each channel, the pairs (p0, p1) and (p2, p3) of 16-bit values.
  const __m256i pairs = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,  //
                                         6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
  __m256i sum = _mm256_setzero_si256();
  for (int t = 0; t < (kTaps ? kTaps : num_taps); t += 4) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + t * 3));
    const __m256i pixels = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(raw), pairs);
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(wide + t * 4));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pixels, weights));
  }
  return sum;
}

template <int kTaps>
__attribute__((target("avx2"))) void row_avx2(const std::uint8_t* source, const Taps& taps, int width,
                                              std::uint8_t* out) {
  const __m256i half = _mm256_set1_epi32(kRound);
  const int stride = kTaps ? kTaps : taps.stride;
  const std::int16_t* wide = taps.wide.data();
  int x = 0;
  // Two pixels at a time share the rounding. Each store writes one extra byte, which the next store overwrites.
  for (; x + 2 < width; x += 2) {
    const __m256i a =
        pixel_avx2<kTaps>(source + taps.first[x] * 3, wide + static_cast<std::size_t>(x) * stride * 4, stride);
    const __m256i b =
        pixel_avx2<kTaps>(source + taps.first[x + 1] * 3, wide + static_cast<std::size_t>(x + 1) * stride * 4, stride);
    __m256i sum = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    sum = _mm256_srai_epi32(_mm256_add_epi32(sum, half), kWeightBits);
    sum = _mm256_packs_epi32(sum, sum);
    sum = _mm256_packus_epi16(sum, sum);
    const int first = _mm256_extract_epi32(sum, 0), second = _mm256_extract_epi32(sum, 4);
    std::memcpy(out + x * 3, &first, 4);
    std::memcpy(out + x * 3 + 3, &second, 4);
  }
  for (; x < width; ++x) {
    const __m256i a =
        pixel_avx2<kTaps>(source + taps.first[x] * 3, wide + static_cast<std::size_t>(x) * stride * 4, stride);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    sum = _mm_srai_epi32(_mm_add_epi32(sum, _mm256_castsi256_si128(half)), kWeightBits);
    sum = _mm_packs_epi32(sum, sum);
    const int rgb = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
    std::memcpy(out + x * 3, &rgb, 3);
  }
}
#endif

void row(Isa isa, const std::uint8_t* source, const Taps& taps, int source_width, int width, std::uint8_t* out) {
#if defined(__x86_64__)
  // If the source were shorter than the taps, the vector code would read past its end.
  if (isa == Isa::avx2 && source_width >= taps.stride) {
    if (taps.stride == 4) return row_avx2<4>(source, taps, width, out);
    if (taps.stride == 8) return row_avx2<8>(source, taps, width, out);
    return row_avx2<0>(source, taps, width, out);
  }
#endif
  row_portable(source, taps, source_width, width, out);
}

void columns(Isa isa, const std::uint8_t* source, std::size_t pitch, const std::int16_t* weight, int num_taps,
             int num_bytes, std::uint8_t* out) {
#if defined(__x86_64__)
  if (isa == Isa::avx2) return columns_avx2(source, pitch, weight, num_taps, num_bytes, out);
#endif
  columns_portable(source, pitch, weight, num_taps, num_bytes, out);
}

}  // namespace

void Taps::widen() {
  wide.resize(weight.size() * 4);
  for (std::size_t quad = 0; quad < weight.size(); quad += 4)
    for (int pair = 0; pair < 2; ++pair)
      for (int channel = 0; channel < 4; ++channel)
        std::memcpy(&wide[quad * 4 + pair * 8 + channel * 2], &weight[quad + pair * 2], 2 * sizeof(std::int16_t));
}

void Taps::make(int source_size, double begin, double end, int out_size, const Filter& filter) {
  const double scale = (end - begin) / out_size;
  const double stretch = filter.antialias ? std::max(scale, 1.0) : 1.0;
  const double reach = (filter.interpolation == Interpolation::bicubic ? 2.0 : 1.0) * stretch;
  const int lowest = filter.stop_at_box ? static_cast<int>(std::floor(begin)) : 0;
  const int highest = filter.stop_at_box ? static_cast<int>(std::ceil(end)) : source_size;
  stride = (static_cast<int>(std::ceil(2.0 * reach)) + 3) / 4 * 4;
  first.resize(out_size);
  this->low.resize(out_size);
  count.resize(out_size);
  weight.assign(static_cast<std::size_t>(out_size) * stride, 0);
  exact_.resize(stride);
  for (int i = 0; i < out_size; ++i) {
    const double center = begin + (i + 0.5) * scale;
    // Anti-aliased kernels drop the taps outside and are normalised. Other kernels see repeated edge pixels there.
    const int from = static_cast<int>(std::floor(center - reach + 0.5)), to = static_cast<int>(center + reach + 0.5);
    const int low = std::clamp(from, lowest, highest - 1);
    const int high = std::min(std::clamp(to, low + 1, highest), low + stride);
    std::fill(exact_.begin(), exact_.end(), 0.0);
    double sum = 0.0;
    for (int s = filter.antialias ? low : from; s < (filter.antialias ? high : to); ++s) {
      const double w = kernel((s + 0.5 - center) / stretch, filter);
      exact_[std::clamp(s, low, high - 1) - low] += w;
      sum += w;
    }
    first[i] = std::max(0, std::min(low, source_size - stride));
    this->low[i] = low;
    count[i] = high - low;
    std::int16_t* mine = weight.data() + static_cast<std::size_t>(i) * stride + (low - first[i]);
    const double unit = (1 << kWeightBits) / sum;
    int total = 0, largest = 0;
    for (int t = 0; t < high - low; ++t) {
      mine[t] = static_cast<std::int16_t>(std::floor(exact_[t] * unit + 0.5));
      total += mine[t];
      if (mine[t] > mine[largest]) largest = t;
    }
    // The rounded weights must add up to one, otherwise flat areas would change.
    mine[largest] = static_cast<std::int16_t>(mine[largest] + (1 << kWeightBits) - total);
  }
}

Isa best_isa() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  return has_avx2 ? Isa::avx2 : Isa::portable;
#else
  return Isa::portable;
#endif
}

void Resizer::run(const Image& source, const Box& box, const Filter& filter, int width, int height, std::uint8_t* out,
                  Isa isa) {
  down_.make(source.height, box.top, box.bottom, height, filter);
  across_.make(source.width, box.left, box.right, width, filter);
  if (isa == Isa::avx2) across_.widen();
  // As in Pillow, the horizontal pass is first and its result is rounded to bytes, so overshoot is clipped in the same
  // places. Only the rows that the second pass reads are computed.
  const int top = *std::min_element(down_.low.begin(), down_.low.end());
  int bottom = top;
  for (int y = 0; y < height; ++y) bottom = std::max(bottom, down_.low[y] + down_.count[y]);
  narrowed_.reset(width, bottom - top);
  for (int y = top; y < bottom; ++y) row(isa, source.row(y), across_, source.width, width, narrowed_.row(y - top));
  for (int y = 0; y < height; ++y) {
    const std::int16_t* weight =
        down_.weight.data() + static_cast<std::size_t>(y) * down_.stride + (down_.low[y] - down_.first[y]);
    columns(isa, narrowed_.row(down_.low[y] - top), static_cast<std::size_t>(width) * 3, weight, down_.count[y],
            width * 3, out + static_cast<std::size_t>(y) * width * 3);
  }
}

}  // namespace fastcssl::codec
