// Registers InfoNCE and the rings as operators through torch's stable ABI. This file checks tensors; kernels take
// pointers.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "infonce/infonce.h"
#include "infonce/infonce_cpu.h"
#include "refuse.h"

namespace {

using fastcssl::refuse;
using fastcssl::shape_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace infonce = fastcssl::infonce;

using Tensors = std::vector<Tensor>;
using Counts = std::vector<std::optional<Tensor>>;
using Swept = std::tuple<Tensor, Tensor, Tensor>;

bool together(const Tensor& a, const Tensor& b) {
  return a.is_cpu() ? b.is_cpu() : b.is_cuda() && a.get_device_index() == b.get_device_index();
}

infonce::Type stored_as(const char* op, const Tensor& bank) {
  if (bank.scalar_type() == ScalarType::Float) return infonce::Type::float32;
  if (bank.scalar_type() == ScalarType::Half) return infonce::Type::float16;
  if (bank.scalar_type() == ScalarType::BFloat16) return infonce::Type::bfloat16;
  refuse(op, ": a bank must be float32, float16 or bfloat16");
}

const std::int64_t* number_in(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  if (tensor.dim() != 0 || tensor.scalar_type() != ScalarType::Long || !together(like, tensor)) {
    refuse(op, ": ", name, " must be a 0-d int64 tensor on the banks' device, but is ", shape_of(tensor));
  }
  return static_cast<const std::int64_t*>(tensor.const_data_ptr());
}

// The arguments that the kernels read, and the tensors that keep them alive.
struct Reading {
  infonce::Rows rows{};
  std::vector<infonce::Bank> banks;
  Tensors kept;

  Reading(const char* op, const Tensor& scaled, const Tensor& positive, const std::optional<Tensor>& own,
          bool positive_in_denominator)
      : op_(op), like_(scaled) {
    if (scaled.dim() != 2 || scaled.scalar_type() != ScalarType::Float) {
      refuse(op, ": scaled must be float32 [M, D], but is ", shape_of(scaled));
    }
    if (positive.dim() != 2 || positive.size(0) != scaled.size(0) || positive.size(1) != scaled.size(1) ||
        positive.scalar_type() != ScalarType::Float || !together(scaled, positive)) {
      refuse(op, ": positive must be float32 ", shape_of(scaled), " as scaled, on its device, but is ",
             shape_of(positive));
    }
    if (scaled.size(1) > std::numeric_limits<int>::max()) refuse(op, ": D is too large, ", scaled.size(1));
    rows.num_rows = scaled.size(0), rows.dim = static_cast<int>(scaled.size(1));
    rows.scaled_MD = static_cast<const float*>(keep(scaled));
    rows.positive_MD = static_cast<const float*>(keep(positive));
    rows.positive_in_denominator = positive_in_denominator;
    if (own.has_value()) {
      if (own->dim() != 1 || own->size(0) != scaled.size(0) || own->scalar_type() != ScalarType::Long ||
          !together(scaled, *own)) {
        refuse(op, ": own must be int64 [", scaled.size(0), "] on the rows' device, but is ", shape_of(*own));
      }
      rows.own_M = static_cast<const std::int64_t*>(keep(*own));
    }
  }

  void add(const Tensor& bank, const std::optional<Tensor>& filled) {
    if (bank.dim() != 2 || bank.size(1) != rows.dim || !together(like_, bank)) {
      refuse(op_, ": a bank must be [K, ", rows.dim, "] on the rows' device, but is ", shape_of(bank));
    }
    const infonce::Type type = stored_as(op_, bank);
    const std::int64_t* count = filled.has_value() ? number_in(op_, "filled", *filled, like_) : nullptr;
    banks.push_back({keep(bank), bank.size(0), type, count});
  }

 private:
  const void* keep(const Tensor& tensor) {
    kept.push_back(torch::stable::contiguous(tensor));
    return kept.back().const_data_ptr();
  }

  const char* op_;
  Tensor like_;
};

// The rings that the kernels write.
struct Writing {
  std::vector<infonce::Ring> rings;
  int dim = 0;
  Tensors kept;

  Writing(const char* op, const Tensors& banks, const Tensors& pointers, const Tensors& filled, const Tensors& keys,
          bool normalise) {
    if (pointers.size() != banks.size() || filled.size() != banks.size() || keys.size() != banks.size()) {
      refuse(op, ": each of ", banks.size(), " rings needs a pointer, a filled count and keys");
    }
    for (std::size_t i = 0; i < banks.size(); ++i) {
      const Tensor& bank = banks[i];
      if (bank.dim() != 2 || bank.size(0) == 0 || !bank.is_contiguous() || bank.size(1) != banks[0].size(1)) {
        refuse(op, ": a ring must be contiguous, [K, D] with at least one row and one D for all, but is ",
               shape_of(bank));
      }
      if (keys[i].dim() != 2 || keys[i].size(1) != bank.size(1) || keys[i].scalar_type() != ScalarType::Float ||
          !together(bank, keys[i]) || !together(banks[0], bank)) {
        refuse(op, ": keys must be float32 [G, ", bank.size(1), "] on their ring's device, but is ", shape_of(keys[i]));
      }
      kept.push_back(torch::stable::contiguous(keys[i]));
      const infonce::Type type = stored_as(op, bank);
      number_in(op, "pointer", pointers[i], bank), number_in(op, "filled", filled[i], bank);
      rings.push_back({bank.mutable_data_ptr(), bank.size(0), type,
                       static_cast<std::int64_t*>(pointers[i].mutable_data_ptr()),
                       static_cast<std::int64_t*>(filled[i].mutable_data_ptr()),
                       static_cast<const float*>(kept.back().const_data_ptr()), keys[i].size(0), normalise});
    }
    dim = banks.empty() ? 0 : static_cast<int>(banks[0].size(1));
  }
};

// Allocates the losses and the wanted gradients. The other gradients are empty.
Swept results(const Tensor& like, const std::vector<bool>& wanted) {
  if (wanted.size() != 2) refuse("info_nce_sweep: wanted must have 2 values, for scaled and for positive");
  const std::vector<std::int64_t> rows{like.size(0)}, shape{like.size(0), like.size(1)}, none{0};
  return {torch::stable::new_empty(like, rows), torch::stable::new_empty(like, wanted[0] ? shape : none),
          torch::stable::new_empty(like, wanted[1] ? shape : none)};
}

infonce::Result pointers_of(Swept& swept, const std::vector<bool>& wanted) {
  auto& [loss, by_scaled, by_positive] = swept;
  return {static_cast<float*>(loss.mutable_data_ptr()),
          wanted[0] ? static_cast<float*>(by_scaled.mutable_data_ptr()) : nullptr,
          wanted[1] ? static_cast<float*>(by_positive.mutable_data_ptr()) : nullptr};
}

Reading reading(const char* op, const Tensor& scaled, const Tensor& positive, const Tensors& banks,
                const Counts& filled, const std::optional<Tensor>& own, bool positive_in_denominator) {
  Reading out(op, scaled, positive, own, positive_in_denominator);
  if (filled.size() != banks.size()) refuse(op, ": filled must have an entry for each of ", banks.size(), " banks");
  for (std::size_t i = 0; i < banks.size(); ++i) out.add(banks[i], filled[i]);
  return out;
}

Reading reading_with_rings(const char* op, const Tensor& scaled, const Tensor& positive, const Tensors& rings,
                           const Tensors& ring_filled, const Tensors& banks, const Counts& filled,
                           const std::optional<Tensor>& own, bool positive_in_denominator) {
  Tensors all = rings;
  all.insert(all.end(), banks.begin(), banks.end());
  Counts counts(ring_filled.begin(), ring_filled.end());
  counts.insert(counts.end(), filled.begin(), filled.end());
  return reading(op, scaled, positive, all, counts, own, positive_in_denominator);
}

// ---- CPU

Swept run_cpu(const Tensor& scaled, const Reading& read, const std::vector<bool>& wanted) {
  Swept out = results(scaled, wanted);
  const auto parallel = [](int count, const std::function<void(int)>& work) {
    torch::stable::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) work(static_cast<int>(i));
    });
  };
  infonce::infonce_cpu(read.rows, read.banks.data(), static_cast<int>(read.banks.size()), pointers_of(out, wanted),
                       static_cast<int>(torch::stable::get_num_threads()), parallel);
  return out;
}

Swept sweep_cpu(Tensor scaled, Tensor positive, Tensors banks, Counts filled, std::optional<Tensor> own,
                bool positive_in_denominator, std::vector<bool> wanted, bool) {
  const Reading read = reading("info_nce_sweep", scaled, positive, banks, filled, own, positive_in_denominator);
  return run_cpu(scaled, read, wanted);
}

Swept sweep_enqueue_cpu(Tensor scaled, Tensor positive, Tensors rings, Tensors pointers, Tensors ring_filled,
                        Tensors keys, bool normalise, Tensors banks, Counts filled, std::optional<Tensor> own,
                        bool positive_in_denominator, std::vector<bool> wanted, bool) {
  const char* op = "info_nce_sweep_enqueue";
  const Writing write(op, rings, pointers, ring_filled, keys, normalise);
  const Reading read =
      reading_with_rings(op, scaled, positive, rings, ring_filled, banks, filled, own, positive_in_denominator);
  Swept out = run_cpu(scaled, read, wanted);
  infonce::enqueue_cpu(write.rings.data(), static_cast<int>(write.rings.size()), write.dim);
  return out;
}

void enqueue_cpu(Tensors rings, Tensors pointers, Tensors filled, Tensors keys, bool normalise) {
  const Writing write("enqueue", rings, pointers, filled, keys, normalise);
  infonce::enqueue_cpu(write.rings.data(), static_cast<int>(write.rings.size()), write.dim);
}

// ---- CUDA: runs on the current stream of the tensors' device without waiting for it.

#ifdef FASTCSSL_WITH_CUDA
using fastcssl::device::Failure;

Swept run_cuda(const char* op, const Tensor& scaled, const Reading& read, const std::vector<bool>& wanted, bool exact,
               void* stream) {
  if (!infonce::infonce_cuda_takes(read.rows.dim)) {
    refuse(op, ": the CUDA kernels take widths that are multiples of 8 up to 256, not ", read.rows.dim);
  }
  Swept out = results(scaled, wanted);
  if (read.rows.num_rows == 0) return out;
  const auto precision = exact ? infonce::Precision::tf32x3 : infonce::Precision::tf32;
  const auto num_banks = static_cast<int>(read.banks.size());
  // Freed when this function returns. The caching allocator reuses it only for later work of the same stream.
  const std::vector<std::int64_t> workspace_size{static_cast<std::int64_t>(
      infonce::infonce_cuda_workspace_bytes(read.rows, read.banks.data(), num_banks, precision))};
  Tensor workspace = torch::stable::empty(workspace_size, ScalarType::Byte, std::nullopt, scaled.device());
  const Failure failure = infonce::infonce_cuda(read.rows, read.banks.data(), num_banks, precision,
                                                pointers_of(out, wanted), workspace.mutable_data_ptr(), stream);
  if (failure) refuse(explain(op, failure));
  return out;
}

void write_cuda(const char* op, const Writing& write, void* stream) {
  if (write.rings.empty()) return;
  const Failure failure =
      infonce::enqueue_cuda(write.rings.data(), static_cast<int>(write.rings.size()), write.dim, stream);
  if (failure) refuse(explain(op, failure));
}

void* stream_of(const Tensor& tensor) {
  return torch::stable::accelerator::getCurrentStream(tensor.get_device_index()).nativeHandle();
}

Swept sweep_cuda(Tensor scaled, Tensor positive, Tensors banks, Counts filled, std::optional<Tensor> own,
                 bool positive_in_denominator, std::vector<bool> wanted, bool exact) {
  const char* op = "info_nce_sweep";
  const torch::stable::accelerator::DeviceGuard guard(scaled.get_device_index());
  const Reading read = reading(op, scaled, positive, banks, filled, own, positive_in_denominator);
  return run_cuda(op, scaled, read, wanted, exact, stream_of(scaled));
}

Swept sweep_enqueue_cuda(Tensor scaled, Tensor positive, Tensors rings, Tensors pointers, Tensors ring_filled,
                         Tensors keys, bool normalise, Tensors banks, Counts filled, std::optional<Tensor> own,
                         bool positive_in_denominator, std::vector<bool> wanted, bool exact) {
  const char* op = "info_nce_sweep_enqueue";
  const torch::stable::accelerator::DeviceGuard guard(scaled.get_device_index());
  const Writing write(op, rings, pointers, ring_filled, keys, normalise);
  const Reading read =
      reading_with_rings(op, scaled, positive, rings, ring_filled, banks, filled, own, positive_in_denominator);
  Swept out = run_cuda(op, scaled, read, wanted, exact, stream_of(scaled));
  write_cuda(op, write, stream_of(scaled));
  return out;
}

void enqueue_cuda(Tensors rings, Tensors pointers, Tensors filled, Tensors keys, bool normalise) {
  if (rings.empty()) return;
  const torch::stable::accelerator::DeviceGuard guard(rings[0].get_device_index());
  write_cuda("enqueue", Writing("enqueue", rings, pointers, filled, keys, normalise), stream_of(rings[0]));
}
#endif

// Returns the instruction set that the CPU path uses. For tests, a name chooses one and "auto" undoes the choice.
std::string info_nce_isa(std::string choose) {
  if (choose == "auto") {
    infonce::infonce_force_isa(nullptr);
  } else if (!choose.empty() && !infonce::infonce_force_isa(choose.c_str())) {
    refuse("info_nce_isa: this processor has no '", choose, "'; use avx512, avx2, portable or auto");
  }
  return infonce::infonce_isa();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastcssl, m) {
  m.def(
      "info_nce_sweep(Tensor scaled, Tensor positive, Tensor[] banks, Tensor?[] filled, Tensor? own, "
      "bool positive_in_denominator, bool[] wanted, bool exact) -> (Tensor, Tensor, Tensor)");
  // Sweeps rings and banks, then writes the keys into the rings.
  m.def(
      "info_nce_sweep_enqueue(Tensor scaled, Tensor positive, Tensor(a!)[] rings, Tensor(b!)[] pointers, "
      "Tensor(c!)[] ring_filled, Tensor[] keys, bool normalise, Tensor[] banks, Tensor?[] filled, Tensor? own, "
      "bool positive_in_denominator, bool[] wanted, bool exact) -> (Tensor, Tensor, Tensor)");
  m.def("enqueue(Tensor(a!)[] rings, Tensor(b!)[] pointers, Tensor(c!)[] filled, Tensor[] keys, bool normalise) -> ()");
  m.def("info_nce_isa(str choose=\"\") -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastcssl, CPU, m) {
  m.impl("info_nce_sweep", TORCH_BOX(&sweep_cpu));
  m.impl("info_nce_sweep_enqueue", TORCH_BOX(&sweep_enqueue_cpu));
  m.impl("enqueue", TORCH_BOX(&enqueue_cpu));
}

#ifdef FASTCSSL_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fastcssl, CUDA, m) {
  m.impl("info_nce_sweep", TORCH_BOX(&sweep_cuda));
  m.impl("info_nce_sweep_enqueue", TORCH_BOX(&sweep_enqueue_cuda));
  m.impl("enqueue", TORCH_BOX(&enqueue_cuda));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(fastcssl, CompositeExplicitAutograd, m) { m.impl("info_nce_isa", TORCH_BOX(&info_nce_isa)); }
