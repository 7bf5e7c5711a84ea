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

double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
  return 0.0;
}
constexpr double kSupport = 2.0;

// For output i: sum over t of weight[i * stride + t] * source[first[i] + t]. Taps are padded with zero weights to a
// multiple of four, and `first` is pulled back so that the padded taps stay inside the source where it is long enough.
struct Taps {
  int stride = 0;
  std::vector<int> first;
  std::vector<std::int16_t> weight;
};

Taps make_taps(int source_size, double begin, double end, int out_size) {
  const double scale = (end - begin) / out_size;
  const double stretch = std::max(scale, 1.0);
  const double reach = kSupport * stretch;
  Taps taps;
  taps.stride = (static_cast<int>(std::ceil(reach)) * 2 + 1 + 3) / 4 * 4;
  taps.first.resize(out_size);
  taps.weight.assign(static_cast<std::size_t>(out_size) * taps.stride, 0);
  std::vector<double> exact(taps.stride);
  for (int i = 0; i < out_size; ++i) {
    const double center = begin + (i + 0.5) * scale;
    const int low = std::max(0, static_cast<int>(center - reach + 0.5));
    const int high = std::min(source_size, static_cast<int>(center + reach + 0.5));
    double sum = 0.0;
    for (int s = low; s < high; ++s) sum += exact[s - low] = bicubic((s + 0.5 - center) / stretch);
    const int first = std::max(0, std::min(low, source_size - taps.stride));
    std::int16_t* weight = taps.weight.data() + static_cast<std::size_t>(i) * taps.stride + (low - first);
    int total = 0, largest = 0;
    for (int t = 0; t < high - low; ++t) {
      weight[t] = static_cast<std::int16_t>(std::lround(exact[t] / sum * (1 << kWeightBits)));
      total += weight[t];
      if (weight[t] > weight[largest]) largest = t;
    }
    // Rounded weights must still add up to one, or flat areas would drift.
    weight[largest] = static_cast<std::int16_t>(weight[largest] + (1 << kWeightBits) - total);
    taps.first[i] = first;
  }
  return taps;
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
__attribute__((target("avx2"))) void columns_avx2(const std::uint8_t* source, std::size_t pitch,
                                                  const std::int16_t* weight, int num_taps, int num_bytes,
                                                  std::uint8_t* out) {
  int j = 0;
  for (; j + 16 <= num_bytes; j += 16) {
    __m256i low = _mm256_set1_epi32(kRound), high = low;
    for (int t = 0; t < num_taps; t += 2) {
      // Two rows at a time, interleaved, so that one multiply-add serves both. An odd last tap meets a zero row.
      const bool pair = t + 1 < num_taps;
      const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + t * pitch + j)));
      const __m256i b =
          pair ? _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + (t + 1) * pitch + j)))
               : _mm256_setzero_si256();
      const int second = pair ? weight[t + 1] : 0;
      const __m256i w = _mm256_set1_epi32((second << 16) | static_cast<std::uint16_t>(weight[t]));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), w));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), w));
    }
    const __m256i words =
        _mm256_packs_epi32(_mm256_srai_epi32(low, kWeightBits), _mm256_srai_epi32(high, kWeightBits));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm256_castsi256_si128(bytes));
  }
  columns_portable(source, pitch, weight, num_taps, num_bytes, out, j);
}

__attribute__((target("avx2"))) void row_avx2(const std::uint8_t* source, const Taps& taps, int source_width,
                                              int width, std::uint8_t* out) {
  // Four RGB pixels (12 of 16 loaded bytes) become, for each channel, the pairs (p0, p1) and (p2, p3) of 16-bit values.
  const __m256i pairs = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,  //
                                         6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
  for (int x = 0; x < width; ++x) {
    const int first = taps.first[x];
    // The last load reads four bytes past its pixels; near the end of the row the portable path takes over.
    if ((first + taps.stride) * 3 + 4 > source_width * 3) {
      row_portable(source, taps, source_width, x + 1, out, x);
      continue;
    }
    const std::int16_t* weight = taps.weight.data() + static_cast<std::size_t>(x) * taps.stride;
    __m256i sum = _mm256_setzero_si256();
    for (int t = 0; t < taps.stride; t += 4) {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + (first + t) * 3));
      const __m256i pixels = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(raw), pairs);
      std::int32_t w01, w23;
      std::memcpy(&w01, weight + t, 4);
      std::memcpy(&w23, weight + t + 2, 4);
      const __m256i w = _mm256_inserti128_si256(_mm256_set1_epi32(w01), _mm_set1_epi32(w23), 1);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pixels, w));
    }
    __m128i total = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    total = _mm_srai_epi32(_mm_add_epi32(total, _mm_set1_epi32(kRound)), kWeightBits);
    total = _mm_packs_epi32(total, total);
    const int rgb = _mm_cvtsi128_si32(_mm_packus_epi16(total, total));
    std::memcpy(out + x * 3, &rgb, 3);
  }
}
#endif

void row(Isa isa, const std::uint8_t* source, const Taps& taps, int source_width, int width, std::uint8_t* out) {
#if defined(__x86_64__)
  if (isa == Isa::avx2) return row_avx2(source, taps, source_width, width, out);
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

Isa best_isa() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  return has_avx2 ? Isa::avx2 : Isa::portable;
#else
  return Isa::portable;
#endif
}

void resize(const Image& source, const Box& box, int width, int height, Image& out, Isa isa) {
  const Taps down = make_taps(source.height, box.top, box.bottom, height);
  const Taps across = make_taps(source.width, box.left, box.right, width);
  // Horizontal first and rounded to bytes between the passes, which is Pillow's order: overshoot is clipped in the same
  // places. Only the rows that the second pass reads are made.
  const int top = *std::min_element(down.first.begin(), down.first.end());
  const int bottom = std::min(source.height, *std::max_element(down.first.begin(), down.first.end()) + down.stride);
  Image narrowed;
  narrowed.reset(width, bottom - top);
  for (int y = top; y < bottom; ++y) row(isa, source.row(y), across, source.width, width, narrowed.row(y - top));
  out.reset(width, height);
  for (int y = 0; y < height; ++y) {
    const int num_taps = std::min(down.stride, source.height - down.first[y]);
    columns(isa, narrowed.row(down.first[y] - top), static_cast<std::size_t>(width) * 3,
            down.weight.data() + static_cast<std::size_t>(y) * down.stride, num_taps, width * 3, out.row(y));
  }
}

}  // namespace fastcssl::codec
