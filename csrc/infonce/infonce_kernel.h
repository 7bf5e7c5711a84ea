// One thread's sweep over its part of the banks, in terms of a vector layer that must be included before this file.
// Everything is in an anonymous namespace, so each instruction set has its own copy.
//
// The sweep is attention with values = keys. A vector holds one number for each of several rows, and keys are broadcast
// directly from the bank, so nothing of a bank is copied or transposed. For each tile of keys and panel of rows
//
//     softmax[j, rows] = 2^(log2(e) sum_d key[j, d] queries[d, rows] - shift[rows])     kept in the L1 cache
//     weighted[d, rows] += sum_j key[j, d] softmax[j, rows]
//
// The shift is near the largest logit so far. It is raised, and the sums are scaled, only when a logit exceeds it by
// `kHeadroom`, which is rare after the first few keys.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace fastcssl::infonce {
namespace {

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
constexpr float kHeadroom = 24.0f;  // in powers of two

// Returns 2^x for x <= 127. Below -100 it returns 2^-100, which is negligible beside the largest term and avoids slow
// subnormal numbers.
FASTCSSL_INLINE F exp2(F x) {
  const F magic = set1(12582912.0f);  // 1.5 x 2^23
  x = max(set1(-100.0f), x);
  const F whole = add(x, magic);
  const F r = sub(x, sub(whole, magic));  // -1/2 .. 1/2
  F p = set1(0.00015345812006346848f);
  p = fma(p, r, set1(0.0013399931219189559f));
  p = fma(p, r, set1(0.00961848895710427f));
  p = fma(p, r, set1(0.05550328776965331f));
  p = fma(p, r, set1(0.24022646890634194f));
  p = fma(p, r, set1(0.6931472057372677f));
  p = fma(p, r, set1(1.0f));
  return add_exponent(p, whole);
}

// A panel of a Sweep and a tile of keys.
struct Work {
  const float* queries;
  const float* keys;
  const char* ahead;  // the keys that are swept next, to be prefetched
  std::int64_t dim;
  int num_keys;
  float* shift;
  float* limit;
  float* total;
  float* weighted;  // or null
  float* softmax;
  const float* own;  // the key of this tile that each row does not see; null: rows see all keys
};

// Raises the shift, because the logits `top` of keys from `done` on exceed the limit. Scales everything summed so far,
// and returns the scale in `factor`.
template <int W>
__attribute__((noinline)) void raise(const Work& work, int done, const float* top, float* factor) {
  constexpr int kRows = W * kLanes;
  for (int w = 0; w < kRows; w += kLanes) {
    const F before = load(work.shift + w), peak = load(top + w);
    const F shift = if_above(peak, load(work.limit + w), mul(peak, set1(kLog2e)), before);
    store(work.shift + w, shift);
    store(work.limit + w, mul(add(shift, set1(kHeadroom)), set1(kLn2)));
    // A row that has not seen a key yet has nothing to scale.
    F scale = if_equal(before, shift, set1(1.0f), exp2(sub(before, shift)));
    scale = if_above(before, set1(-std::numeric_limits<float>::infinity()), scale, set1(0.0f));
    store(factor + w, scale);
    store(work.total + w, mul(load(work.total + w), scale));
  }
  if (work.weighted == nullptr) return;
  const auto scale_all = [&](float* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (int w = 0; w < kRows; w += kLanes) {
        store(values + i * kRows + w, mul(load(values + i * kRows + w), load(factor + w)));
      }
    }
  };
  scale_all(work.softmax, done);
  scale_all(work.weighted, work.dim);
}

// Computes the softmax of R keys of the tile from number `first` on, and adds it to `sum`.
template <int R, int W, bool kOwn>
FASTCSSL_INLINE void softmax_of(const Work& work, int first, F (&sum)[W]) {
  constexpr int kRows = W * kLanes;
  const float* keys = work.keys + first * work.dim;
  F s[R][W];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w) s[r][w] = set1(0.0f);
  }
  const float* queries = work.queries;
  const char* ahead = work.ahead + first * work.dim * sizeof(float);
  for (std::int64_t d = 0; d < work.dim; ++d, queries += kRows, ahead += R * sizeof(float)) {
    __builtin_prefetch(ahead, 0, 2);
    F q[W];
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w) q[w] = load(queries + w * kLanes);
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r) {
      const F key = set1(keys[r * work.dim + d]);
#pragma GCC unroll 3
      for (int w = 0; w < W; ++w) s[r][w] = fma(key, q[w], s[r][w]);
    }
  }
  if (kOwn) {
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r) {
      const F number = set1(static_cast<float>(first + r));
#pragma GCC unroll 3
      for (int w = 0; w < W; ++w) {
        const F hidden = set1(-std::numeric_limits<float>::infinity());
        s[r][w] = if_equal(load(work.own + w * kLanes), number, hidden, s[r][w]);
      }
    }
  }
  F top[W];
  bool above = false;
#pragma GCC unroll 3
  for (int w = 0; w < W; ++w) {
    top[w] = s[0][w];
#pragma GCC unroll 24
    for (int r = 1; r < R; ++r) top[w] = max(top[w], s[r][w]);
    above |= any_above(top[w], load(work.limit + w * kLanes));
  }
  if (__builtin_expect(above, 0)) {
    float tops[kRows], factor[kRows];
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w) store(tops + w * kLanes, top[w]);
    raise<W>(work, first, tops, factor);
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w) sum[w] = mul(sum[w], load(factor + w * kLanes));
  }
  float* out = work.softmax + first * kRows;
#pragma GCC unroll 3
  for (int w = 0; w < W; ++w) {
    const F down = sub(set1(0.0f), load(work.shift + w * kLanes));
    F part = set1(0.0f);
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r) {
      F p = exp2(fma(s[r][w], set1(kLog2e), down));
      if (kOwn) {
        p = if_equal(load(work.own + w * kLanes), set1(static_cast<float>(first + r)), set1(0.0f), p);
      }
      part = add(part, p);
      store(out + r * kRows + w * kLanes, p);
    }
    sum[w] = add(sum[w], part);
  }
}

// Adds to weighted[d, rows] for R dimensions from `first` on.
template <int R, int W>
FASTCSSL_INLINE void add_weighted(const Work& work, std::int64_t first) {
  constexpr int kRows = W * kLanes;
  float* out = work.weighted + first * kRows;
  F s[R][W];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w) s[r][w] = set1(0.0f);
  }
  const float* keys = work.keys + first;
  const float* softmax = work.softmax;
  for (int j = 0; j < work.num_keys; ++j, keys += work.dim, softmax += kRows) {
    F p[W];
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w) p[w] = load(softmax + w * kLanes);
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r) {
      const F key = set1(keys[r]);
#pragma GCC unroll 3
      for (int w = 0; w < W; ++w) s[r][w] = fma(key, p[w], s[r][w]);
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int w = 0; w < W; ++w) {
      float* p = out + r * kRows + w * kLanes;
      store(p, add(load(p), s[r][w]));
    }
  }
}

template <int W, bool kOwn>
__attribute__((noinline)) void tile(const Work& work) {
  constexpr int R = kSums / W;
  F sum[W];
  for (int w = 0; w < W; ++w) sum[w] = set1(0.0f);
  int j = 0;
  for (; j + R <= work.num_keys; j += R) softmax_of<R, W, kOwn>(work, j, sum);
  for (; j < work.num_keys; ++j) softmax_of<1, W, kOwn>(work, j, sum);
  for (int w = 0; w < W; ++w) {
    store(work.total + w * kLanes, add(load(work.total + w * kLanes), sum[w]));
  }
  if (work.weighted == nullptr) return;
  std::int64_t d = 0;
  for (; d + R <= work.dim; d += R) add_weighted<R, W>(work, d);
  for (; d < work.dim; ++d) add_weighted<1, W>(work, d);
}

template <int W>
void tile_of(Work& work, const std::int64_t* own, std::int64_t first_key) {
  constexpr int kRows = W * kLanes;
  float in_tile[kRows];
  bool any = false;
  for (int i = 0; own != nullptr && i < kRows; ++i) {
    const std::int64_t at = own[i] - first_key;
    const bool here = at >= 0 && at < work.num_keys;
    in_tile[i] = here ? static_cast<float>(at) : -1.0f;
    any |= here;
  }
  work.own = any ? in_tile : nullptr;
  if (any) {
    tile<W, true>(work);
  } else {
    tile<W, false>(work);
  }
}

template <Type kType>
FASTCSSL_INLINE F from(const std::uint16_t* p) {
  return kType == Type::float16 ? from_float16(p) : from_bfloat16(p);
}

template <Type kType>
void widen(const void* keys, std::int64_t first, std::int64_t count, float* to) {
  const auto* p = static_cast<const std::uint16_t*>(keys) + first;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, from<kType>(p + i));
  std::uint16_t rest[kLanes] = {};
  float wide[kLanes];
  for (std::int64_t k = i; k < count; ++k) rest[k - i] = p[k];
  store(wide, from<kType>(rest));
  for (std::int64_t k = i; k < count; ++k) to[k] = wide[k - i];
}

void run(const Sweep& sweep) {
  const std::int64_t dim = sweep.dim;
  Work work{};
  work.dim = dim, work.softmax = sweep.softmax;
  for (const Span& span : sweep.spans) {
    for (std::int64_t first = 0; first < span.count; first += kTileKeys) {
      const std::int64_t left = span.count - first;
      work.num_keys = static_cast<int>(left < kTileKeys ? left : kTileKeys);
      const std::int64_t bytes = span.type == Type::float32 ? 4 : 2;
      const std::int64_t next = left > kTileKeys ? first + kTileKeys : first;
      work.ahead = static_cast<const char*>(span.keys_KD) + next * dim * bytes;
      if (span.type == Type::float32) {
        work.keys = static_cast<const float*>(span.keys_KD) + first * dim;
      } else {
        const auto widen_tile = span.type == Type::float16 ? widen<Type::float16> : widen<Type::bfloat16>;
        widen_tile(span.keys_KD, first * dim, work.num_keys * dim, sweep.widened);
        work.keys = sweep.widened;
      }
      for (int i = 0; i < sweep.num_panels; ++i) {
        const Panel& panel = sweep.panels[i];
        work.queries = sweep.queries + panel.first_row * dim;
        work.shift = sweep.shift + panel.first_row;
        work.limit = sweep.limit + panel.first_row;
        work.total = sweep.total + panel.first_row;
        work.weighted = sweep.weighted == nullptr ? nullptr : sweep.weighted + panel.first_row * dim;
        const std::int64_t* own = sweep.own == nullptr ? nullptr : sweep.own + panel.first_row;
        if (kWide >= 3 && panel.width == 3) {
          tile_of<(kWide >= 3 ? 3 : 1)>(work, own, span.first + first);
        } else if (panel.width == 2) {
          tile_of<2>(work, own, span.first + first);
        } else {
          tile_of<1>(work, own, span.first + first);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fastcssl::infonce
