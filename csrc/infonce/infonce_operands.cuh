// The operands of a sweep's two tensor-core products, for each type of bank, and their places in shared memory.
//
//     logits = queries keys^T        contraction over columns, kDepth at a time
//     means += weights keys          contraction over keys, kDepth at a time
//
// Rows (queries or weights) are the left operand and keys the right one. Both products use the same copy of the tile.
// With g = lane / 4 and t = lane % 4, a lane holds rows g and g + 8 of columns 2t and 2t + 1 of a 16 x 8 result.
//
// A key tile is [key][column] in chunks of 16 bytes. Chunk c of key k is at place c ^ (k % 8) of its row. This avoids
// bank conflicts both when eight lanes read one chunk of eight keys and when they read two neighbouring chunks of four
// keys. Queries are stored in the order in which lanes need them, 16 bytes per lane, which needs no address arithmetic
// and avoids conflicts too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "infonce_instructions.cuh"
#include "infonce_tiles.h"

namespace fastcssl::infonce::gpu {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kFragmentBytes = kWarp * 16;

template <int kRowBytes>
__device__ constexpr unsigned place(int key, int chunk) {
  return static_cast<unsigned>(key * kRowBytes + ((chunk ^ (key & 7)) * kChunkBytes));
}

// Returns the bits that turn the address of chunk 0 or 1 into that of the same chunk of pair `index` by exclusive or.
// This works on addresses because tiles are aligned to at least a row. (Applied to the place, before the address of the
// stage is added, it would give a constant per thread and pair, and the compiler would keep all of them in registers.)
__device__ constexpr unsigned chunk_pair(int index) { return static_cast<unsigned>(index * 2 * kChunkBytes); }

template <typename T>
struct Halves;

template <>
struct Halves<__half> {
  static constexpr int kExactParts = 2;  // 11 bits each; the queries are scaled into the range where this holds
  __device__ static unsigned pack(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
  __device__ static float2 unpack(unsigned bits) { return __half22float2(*reinterpret_cast<const __half2*>(&bits)); }
  __device__ static void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply_float16(sum, a, b);
  }
};

template <>
struct Halves<__nv_bfloat16> {
  static constexpr int kExactParts = 3;  // 8 bits each
  __device__ static unsigned pack(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
  __device__ static float2 unpack(unsigned bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
  __device__ static void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply_bfloat16(sum, a, b);
  }
};

// Operands for banks of type T. With kExact, numbers that T cannot represent are sums of several numbers of T.
template <typename T, bool kExact>
struct Operands {
  using Half = Halves<T>;
  static constexpr int kDepth = 16;
  static constexpr int kParts = kExact ? Half::kExactParts : 1;
  static constexpr int kGroup = 2;                        // column tiles per load of `values`
  static constexpr int kQueryFragments = kExact ? 2 : 1;  // each of kFragmentBytes, for 16 rows x kDepth columns
  struct Rows {
    unsigned part[kParts][4];
  };
  struct Keys {
    unsigned bits[2];
  };

  // Packs a lane's eight numbers of a 16 x 16 left operand: a pair of columns of rows g and g + 8, then the pair 8
  // columns further.
  __device__ static Rows rows(const float (&x)[8]) {
    Rows out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 rest{x[2 * i], x[2 * i + 1]};
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        out.part[p][i] = Half::pack(rest.x, rest.y);
        const float2 taken = Half::unpack(out.part[p][i]);
        rest = {rest.x - taken.x, rest.y - taken.y};
      }
    }
    return out;
  }
  __device__ static Rows weights(const float (*tiles)[4]) {
    const float *a = tiles[0], *b = tiles[1];
    return rows({a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]});
  }
  __device__ static Keys keys(unsigned first, unsigned second) { return {{first, second}}; }

  // Adds the small parts first, because they would be lost in a large sum.
  __device__ static void multiply(float (&sum)[4], const Rows& rows, const Keys& keys) {
#pragma unroll
    for (int p = kParts - 1; p >= 0; --p) Half::multiply(sum, rows.part[p], keys.bits);
  }

  __device__ static void store_query(unsigned char* fragments, int row, int column, float value) {
    const int lane = row % 8 * 4 + column % 8 / 2, index = row / 8 * 2 + column / 8 * 4 + column % 2;
    if constexpr (kExact) {
      reinterpret_cast<float*>(fragments + index / 4 * kFragmentBytes + lane * 16)[index % 4] = value;
    } else {
      const unsigned bits = Half::pack(value, 0.0f);
      reinterpret_cast<unsigned short*>(fragments + lane * 16)[index] = static_cast<unsigned short>(bits);
    }
  }
  __device__ static Rows load_query(const unsigned char* fragments, int lane) {
    if constexpr (kExact) {
      const float4 a = *reinterpret_cast<const float4*>(fragments + lane * 16);
      const float4 b = *reinterpret_cast<const float4*>(fragments + kFragmentBytes + lane * 16);
      return rows({a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w});
    } else {
      const uint4 a = *reinterpret_cast<const uint4*>(fragments + lane * 16);
      return {{{a.x, a.y, a.z, a.w}}};
    }
  }

  // Loads the right operand of the means: 16 keys from `key` on, in the 16 columns of a group.
  template <int kRowBytes>
  __device__ static void values(Keys (&out)[kGroup], const unsigned char*, unsigned address, int key, int group,
                                int lane) {
    unsigned bits[4];
    const unsigned first = (address + place<kRowBytes>(lane % 16, lane / 16)) ^ chunk_pair(group);
    load_matrices_transposed(bits, first + static_cast<unsigned>(key * kRowBytes));
    out[0] = {{bits[0], bits[1]}};
    out[1] = {{bits[2], bits[3]}};
  }
  // A lane's results in a group are kRuns runs of neighbouring columns in row g (half 0) and row g + 8 (half 1).
  static constexpr int kRuns = 2;
  __device__ static int column(int group, int run, int t) { return group * 16 + run * 8 + t * 2; }
  __device__ static void store(float* target, const float (*sums)[4], int run, int half) {
    *reinterpret_cast<float2*>(target) = {sums[run][half * 2], sums[run][half * 2 + 1]};
  }
};

// Operands for float32 banks. In `weights` x keys, contraction place t of eight keys is key 2t, and place t + 4 is key
// 2t + 1. Then the weights are where the logits were, and a lane reads whole chunks. Tile j of 32 columns has columns
// j, j + 4, j + 8, ...
template <bool kExact>
struct Operands<float, kExact> {
  static constexpr int kDepth = 8;
  static constexpr int kGroup = 4;
  static constexpr int kQueryFragments = 1;
  static constexpr int kParts = kExact ? 2 : 1;
  struct Rows {
    unsigned part[kParts][4];
  };
  struct Keys {
    unsigned part[kParts][2];
  };

  __device__ static void split(float x, unsigned& high) { high = round_to_tf32(x); }
  __device__ static void split(float x, unsigned& high, unsigned& low) {
    high = round_to_tf32(x);
    low = __float_as_uint(x - __uint_as_float(high));
  }

  // Packs a lane's four numbers of a 16 x 8 left operand: column t of rows g and g + 8, then column t + 4 of both.
  __device__ static Rows rows(const float (&x)[4]) {
    Rows out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kExact) {
        split(x[i], out.part[0][i], out.part[1][i]);
      } else {
        split(x[i], out.part[0][i]);
      }
    }
    return out;
  }
  __device__ static Rows weights(const float (*tiles)[4]) {
    return rows({tiles[0][0], tiles[0][2], tiles[0][1], tiles[0][3]});
  }
  __device__ static Keys keys(unsigned first, unsigned second) {
    Keys out;
    if constexpr (kExact) {
      split(__uint_as_float(first), out.part[0][0], out.part[1][0]);
      split(__uint_as_float(second), out.part[0][1], out.part[1][1]);
    } else {
      split(__uint_as_float(first), out.part[0][0]);
      split(__uint_as_float(second), out.part[0][1]);
    }
    return out;
  }

  __device__ static void multiply(float (&sum)[4], const Rows& rows, const Keys& keys) {
    if constexpr (kExact) {
      multiply_tf32(sum, rows.part[1], keys.part[0]);
      multiply_tf32(sum, rows.part[0], keys.part[1]);
    }
    multiply_tf32(sum, rows.part[0], keys.part[0]);
  }

  __device__ static void store_query(unsigned char* fragments, int row, int column, float value) {
    const int lane = row % 8 * 4 + column % 4, index = row / 8 + column / 4 * 2;
    if constexpr (!kExact) value = __uint_as_float(round_to_tf32(value));
    reinterpret_cast<float*>(fragments + lane * 16)[index] = value;
  }
  __device__ static Rows load_query(const unsigned char* fragments, int lane) {
    if constexpr (kExact) {
      const float4 a = *reinterpret_cast<const float4*>(fragments + lane * 16);
      return rows({a.x, a.y, a.z, a.w});
    } else {
      const uint4 a = *reinterpret_cast<const uint4*>(fragments + lane * 16);
      return {{{a.x, a.y, a.z, a.w}}};
    }
  }

  // Loads eight keys from `key` on, in the 32 columns of a group.
  template <int kRowBytes>
  __device__ static void values(Keys (&out)[kGroup], const unsigned char* tile, unsigned, int key, int group,
                                int lane) {
    const int g = lane / 4, t = lane % 4, at = key * kRowBytes + group * 8 * kChunkBytes;
    const uint4 even = *reinterpret_cast<const uint4*>(tile + place<kRowBytes>(2 * t, g) + at);
    const uint4 odd = *reinterpret_cast<const uint4*>(tile + place<kRowBytes>(2 * t + 1, g) + at);
    out[0] = keys(even.x, odd.x);
    out[1] = keys(even.y, odd.y);
    out[2] = keys(even.z, odd.z);
    out[3] = keys(even.w, odd.w);
  }
  static constexpr int kRuns = 2;
  __device__ static int column(int group, int run, int t) { return group * 32 + t * 8 + run * 4; }
  __device__ static void store(float* target, const float (*sums)[4], int run, int half) {
    const int i = half * 2 + run;
    *reinterpret_cast<float4*>(target) = {sums[0][i], sums[1][i], sums[2][i], sums[3][i]};
  }
};

}  // namespace fastcssl::infonce::gpu
