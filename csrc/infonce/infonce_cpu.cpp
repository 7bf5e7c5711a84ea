// InfoNCE on the CPU: divides rows into panels and banks into parts, combines the parts, and chooses the instruction
// set.
#include "infonce/infonce_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "half.h"
#include "isa.h"

namespace fastcssl::infonce {
namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  int lanes, wide;
  Kernel kernel;
};

const Isa kIsas[] = {{"avx512", has_avx512, kLanesAvx512, kWideAvx512, sweep_avx512},
                     {"avx2", has_avx2, kLanesAvx2, kWideAvx2, sweep_avx2},
                     {"portable", [] { return true; }, kLanesPortable, kWidePortable, sweep_portable}};

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

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};
using Floats = std::unique_ptr<float[], AlignedDelete>;

Floats floats(std::int64_t count) {
  const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
  return Floats(static_cast<float*>(::operator new(bytes, std::align_val_t{64})));
}

// Makes panels as wide as possible, but avoids a panel of width 1 after wide ones, which would use the registers badly.
std::vector<Panel> panels_of(std::int64_t num_rows, const Isa& isa) {
  std::vector<Panel> panels;
  std::int64_t left = (num_rows + isa.lanes - 1) / isa.lanes, first = 0;
  while (left > 0) {
    int width = static_cast<int>(std::min<std::int64_t>(left, isa.wide));
    if (left == isa.wide + 1 && isa.wide > 2) width = isa.wide - 1;
    panels.push_back({first, width});
    first += std::int64_t{width} * isa.lanes;
    left -= width;
  }
  return panels;
}

std::vector<Span> visible(const Bank* banks, int num_banks) {
  std::vector<Span> spans;
  for (int b = 0; b < num_banks; ++b) {
    std::int64_t count = banks[b].num_rows;
    if (banks[b].filled != nullptr) count = std::clamp<std::int64_t>(*banks[b].filled, 0, count);
    if (count > 0) spans.push_back({banks[b].rows_KD, banks[b].type, 0, count});
  }
  return spans;
}

std::int64_t tiles_of(const Span& span) { return (span.count + kTileKeys - 1) / kTileKeys; }

// Returns tiles first .. last - 1 of all spans.
std::vector<Span> part_of(const std::vector<Span>& spans, std::int64_t dim, std::int64_t first, std::int64_t last) {
  std::vector<Span> out;
  for (const Span& span : spans) {
    const std::int64_t tiles = tiles_of(span), begin = std::max<std::int64_t>(first, 0), end = std::min(last, tiles);
    if (begin < end) {
      const std::int64_t from = begin * kTileKeys, to = std::min(end * kTileKeys, span.count);
      const std::int64_t bytes = span.type == Type::float32 ? 4 : 2;
      out.push_back({static_cast<const char*>(span.keys_KD) + from * dim * bytes, span.type, from, to - from});
    }
    first -= tiles, last -= tiles;
  }
  return out;
}

// Returns more parts than threads, so that a slow thread does not delay the others, but not many, because each part
// needs its own sums.
int parts_for(int num_threads) { return num_threads <= 1 ? 1 : std::max(num_threads, std::min(4 * num_threads, 16)); }

// The result of one part of the banks.
struct Part {
  Floats shift, total, weighted;
};

class Job {
 public:
  Job(const Rows& rows, const Bank* banks, int num_banks, const Result& result, int num_threads)
      : isa_(*chosen_isa().load(std::memory_order_relaxed)),
        rows_(rows),
        result_(result),
        dim_(rows.dim),
        panels_(panels_of(rows.num_rows, isa_)),
        padded_(panels_.back().first_row + std::int64_t{panels_.back().width} * isa_.lanes),
        spans_(visible(banks, num_banks)),
        queries_(floats(padded_ * dim_)) {
    for (const Span& span : spans_) num_tiles_ += tiles_of(span);
    parts_.resize(static_cast<std::size_t>(std::min<std::int64_t>(parts_for(num_threads), num_tiles_)));
    if (rows.own_M != nullptr) {
      own_.assign(static_cast<std::size_t>(padded_), -1);
      std::copy(rows.own_M, rows.own_M + rows.num_rows, own_.begin());
    }
  }

  int num_panels() const { return static_cast<int>(panels_.size()); }
  int num_parts() const { return static_cast<int>(parts_.size()); }

  // Transposes the rows of a panel. Rows past the last one are zero.
  void pack(int number) {
    const Panel& panel = panels_[static_cast<std::size_t>(number)];
    const std::int64_t width = std::int64_t{panel.width} * isa_.lanes;
    float* to = queries_.get() + panel.first_row * dim_;
    for (std::int64_t i = 0; i < width; ++i) {
      const std::int64_t row = panel.first_row + i;
      for (std::int64_t d = 0; d < dim_; ++d) {
        to[d * width + i] = row < rows_.num_rows ? rows_.scaled_MD[row * dim_ + d] : 0.0f;
      }
    }
  }

  void sweep(int number) {
    Part& part = parts_[static_cast<std::size_t>(number)];
    const std::int64_t num_parts = static_cast<std::int64_t>(parts_.size());
    const auto widest = std::int64_t{isa_.wide} * isa_.lanes;
    part.shift = floats(padded_), part.total = floats(padded_);
    if (result_.by_scaled_MD != nullptr) {
      part.weighted = floats(padded_ * dim_);
      std::fill_n(part.weighted.get(), padded_ * dim_, 0.0f);
    }
    const Floats limit = floats(padded_), softmax = floats(kTileKeys * widest);
    std::fill_n(part.shift.get(), padded_, -std::numeric_limits<float>::infinity());
    std::fill_n(limit.get(), padded_, -std::numeric_limits<float>::infinity());
    std::fill_n(part.total.get(), padded_, 0.0f);
    Sweep sweep{};
    sweep.dim = rows_.dim, sweep.queries = queries_.get(), sweep.own = own_.empty() ? nullptr : own_.data();
    sweep.spans = part_of(spans_, dim_, num_tiles_ * number / num_parts, num_tiles_ * (number + 1) / num_parts);
    sweep.shift = part.shift.get(), sweep.total = part.total.get(), sweep.weighted = part.weighted.get();
    sweep.limit = limit.get(), sweep.softmax = softmax.get();
    Floats widened;
    if (std::any_of(sweep.spans.begin(), sweep.spans.end(), [](const Span& s) { return s.type != Type::float32; })) {
      widened = floats(kTileKeys * dim_);
    }
    sweep.widened = widened.get();
    // Takes as many rows at a time as fit into the second-level cache together with their sums.
    const std::int64_t floats_each = std::max<std::int64_t>(1, dim_ * widest);
    const auto group = static_cast<std::size_t>(std::max<std::int64_t>(1, kGroupFloats / floats_each));
    for (std::size_t first = 0; first < panels_.size(); first += group) {
      sweep.panels = panels_.data() + first;
      sweep.num_panels = static_cast<int>(std::min(group, panels_.size() - first));
      isa_.kernel(sweep);
    }
  }

  // Computes the results for the rows of a panel from all parts.
  void finish(int number) {
    const Panel& panel = panels_[static_cast<std::size_t>(number)];
    const std::int64_t width = std::int64_t{panel.width} * isa_.lanes;
    std::vector<double> share(parts_.size());
    for (std::int64_t row = panel.first_row; row < std::min(panel.first_row + width, rows_.num_rows); ++row) {
      double shift = -std::numeric_limits<double>::infinity(), total = 0.0;
      for (const Part& part : parts_) shift = std::max<double>(shift, part.shift[row]);
      for (std::size_t p = 0; p < parts_.size(); ++p) {
        share[p] = parts_[p].shift[row] > -std::numeric_limits<float>::infinity()
                       ? std::exp2(parts_[p].shift[row] - shift)
                       : 0.0;
        total += share[p] * parts_[p].total[row];
      }
      const float* scaled = rows_.scaled_MD + row * dim_;
      const float* positive = rows_.positive_MD + row * dim_;
      double pull = 0.0;
      for (std::int64_t d = 0; d < dim_; ++d) pull += static_cast<double>(scaled[d]) * positive[d];
      const double margin = (shift + std::log2(total)) * 0.69314718055994530942 - pull;
      double loss = 0.0, weight = 0.0;
      if (total != 0.0) {  // otherwise the row saw no key
        loss = margin, weight = 1.0;
        if (rows_.positive_in_denominator) {
          loss = margin > 0.0 ? margin + std::log1p(std::exp(-margin)) : std::log1p(std::exp(margin));
          weight = 1.0 / (1.0 + std::exp(-margin));
        }
      }
      result_.loss_M[row] = static_cast<float>(loss);
      if (result_.by_positive_MD != nullptr) {
        const auto down = static_cast<float>(-weight);
        for (std::int64_t d = 0; d < dim_; ++d) result_.by_positive_MD[row * dim_ + d] = down * scaled[d];
      }
      if (result_.by_scaled_MD == nullptr) continue;
      float* out = result_.by_scaled_MD + row * dim_;
      const std::int64_t at = panel.first_row * dim_ + row - panel.first_row;
      for (double& s : share) s = total != 0.0 ? s / total : 0.0;
      for (std::int64_t d = 0; d < dim_; ++d) {
        double mean = 0.0;
        for (std::size_t p = 0; p < parts_.size(); ++p) mean += share[p] * parts_[p].weighted[at + d * width];
        out[d] = static_cast<float>(weight * (mean - positive[d]));
      }
    }
  }

 private:
  static constexpr std::int64_t kGroupFloats = 65536;

  const Isa& isa_;
  const Rows& rows_;
  const Result& result_;
  std::int64_t dim_;
  std::vector<Panel> panels_;
  std::int64_t padded_;  // the number of rows with padding
  std::vector<Span> spans_;
  std::int64_t num_tiles_ = 0;
  Floats queries_;
  std::vector<std::int64_t> own_;
  std::vector<Part> parts_;
};

void put(const float* from, float scale_down, std::int64_t dim, Type type, void* rows_KD, std::int64_t row) {
  for (std::int64_t d = 0; d < dim; ++d) {
    const float value = from[d] / scale_down;
    if (type == Type::float32) {
      static_cast<float*>(rows_KD)[row * dim + d] = value;
    } else {
      static_cast<std::uint16_t*>(rows_KD)[row * dim + d] =
          type == Type::float16 ? half_of_float(value) : bfloat_of_float(value);
    }
  }
}

}  // namespace

void infonce_cpu(const Rows& rows, const Bank* banks, int num_banks, const Result& result, int num_threads,
                 const Parallel& parallel) {
  if (rows.num_rows == 0) return;
  Job job(rows, banks, num_banks, result, num_threads);
  parallel(job.num_panels(), [&](int number) { job.pack(number); });
  std::atomic<int> next{0};
  parallel(std::min(std::max(num_threads, 1), job.num_parts()), [&](int) {
    for (int number = next++; number < job.num_parts(); number = next++) job.sweep(number);
  });
  parallel(job.num_panels(), [&](int number) { job.finish(number); });
}

void enqueue_cpu(const Ring* rings, int num_rings, int dim) {
  for (int r = 0; r < num_rings; ++r) {
    const Ring& ring = rings[r];
    if (ring.num_rows == 0 || ring.num_keys == 0) continue;
    const std::int64_t start = *ring.pointer % ring.num_rows;
    for (std::int64_t i = std::max<std::int64_t>(0, ring.num_keys - ring.num_rows); i < ring.num_keys; ++i) {
      const float* key = ring.keys_GD + i * dim;
      float length = 1.0f;
      if (ring.normalise) {
        double squares = 0.0;
        for (int d = 0; d < dim; ++d) squares += static_cast<double>(key[d]) * key[d];
        length = std::max(static_cast<float>(std::sqrt(squares)), 1e-12f);
      }
      put(key, length, dim, ring.type, ring.rows_KD, (start + i) % ring.num_rows);
    }
    *ring.pointer = (start + ring.num_keys) % ring.num_rows;
    *ring.filled = std::min(*ring.filled + ring.num_keys, ring.num_rows);
  }
}

const char* infonce_isa() { return chosen_isa().load(std::memory_order_relaxed)->name; }

bool infonce_force_isa(const char* name) {
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

}  // namespace fastcssl::infonce
