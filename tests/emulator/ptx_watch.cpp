#include "ptx_watch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "scheduler.h"

namespace ptx {
namespace {

constexpr int kCellBytes = 2, kBanks = 32, kSectorBytes = 32;
constexpr std::size_t kDynamicAlignment = ::emulator::kDynamicAlignment;

}  // namespace

Watch& Watch::instance() {
  static Watch watch;
  return watch;
}

Registration::Registration(const char* name, void (*run)(const void* const*), int static_bytes, const SiteName* sites,
                           int num_sites) {
  Watch::Kernel& kernel = Watch::instance().kernels_[name];
  kernel.run = run;
  kernel.static_bytes = static_bytes;
  kernel.sites.assign(sites, sites + num_sites);
}

Watch::Run Watch::begin_launch(const void* kernel) {
  Dl_info info;
  const bool named = dladdr(kernel, &info) != 0 && info.dli_sname != nullptr;
  current_name_ = named ? info.dli_sname : "a function without a name";
  const auto found = kernels_.find(current_name_);
  current_ = found == kernels_.end() ? nullptr : &found->second;
  if (current_ == nullptr) return nullptr;
  totals_[current_name_].resize(current_->sites.size());
  return current_->run;
}

std::size_t Watch::shared_bytes(std::size_t dynamic_bytes) const {
  return dynamic_bytes == 0 ? static_cast<std::size_t>(current_->static_bytes) : dynamic_offset() + dynamic_bytes;
}

std::uint32_t Watch::dynamic_offset() const {
  const std::size_t bytes = static_cast<std::size_t>(current_->static_bytes);
  return static_cast<std::uint32_t>((bytes + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment);
}

void Watch::begin_block() {
  count_warps();
  cells_.clear();
  threads_.clear();
}

void Watch::end_launch() { begin_block(); }

Watch::Thread& Watch::me() {
  const std::size_t thread = static_cast<std::size_t>(::emulator::Scheduler::instance().thread());
  if (threads_.size() <= thread) threads_.resize(thread + 1);
  if (threads_[thread].visits.empty()) threads_[thread].visits.resize(current_->sites.size());
  return threads_[thread];
}

void Watch::race(const std::string& message) {
  if (num_races_++ == 0) first_race_ = current_name_ + ": " + message;
}

void Watch::touch(std::uint32_t address, int bytes, bool writes, const char* what, int site) {
  const int thread = ::emulator::Scheduler::instance().thread();
  const std::uint32_t stretch = me().stretch;
  const std::size_t first = address / kCellBytes, last = (address + static_cast<std::uint32_t>(bytes) - 1) / kCellBytes;
  if (cells_.size() <= last) cells_.resize(last + 1);
  for (std::size_t i = first; i <= last; ++i) {
    Cell& cell = cells_[i];
    const auto clash = [&](const std::string& other) {
      race("line " + std::to_string(current_->sites[static_cast<std::size_t>(site)].line) + ", " + what + " of byte " +
           std::to_string(i * kCellBytes) + " by thread " + std::to_string(thread) + " and " + other);
    };
    if (cell.pending) clash("a copy that has not arrived");
    if (cell.written == stretch && cell.writer != thread) clash("a write by thread " + std::to_string(cell.writer));
    if (writes && cell.read == stretch && cell.reader != thread) clash("a read by thread " + std::to_string(cell.reader));
    if (writes) {
      cell.writer = thread;
      cell.written = stretch;
    } else {
      cell.reader = cell.read == stretch && cell.reader != thread ? -2 : thread;
      cell.read = stretch;
    }
  }
}

void Watch::note(int site, std::uint64_t address, int bytes, bool shared) {
  const int thread = ::emulator::Scheduler::instance().thread();
  const std::uint64_t visit = me().visits[static_cast<std::size_t>(site)]++;
  const std::uint64_t warp = static_cast<std::uint64_t>(thread / ::emulator::kWarpSize);
  const std::uint64_t key = static_cast<std::uint64_t>(site) << 40 | warp << 32 | visit << 1 | (shared ? 1u : 0u);
  warps_[key].push_back({thread % ::emulator::kWarpSize, bytes, address, shared});
}

void Watch::count_warps() {
  for (const auto& [key, lanes] : warps_) {
    Totals& totals = totals_[current_name_][key >> 40];
    ++totals.accesses;
    const int bytes = lanes.front().bytes;
    if (!lanes.front().shared) {
      std::set<std::uint64_t> sectors;
      std::set<std::uint64_t> words;  // two lanes that read one word need it once
      for (const Lane& lane : lanes) {
        for (int b = 0; b < lane.bytes; b += kCellBytes) {
          sectors.insert((lane.address + static_cast<std::uint64_t>(b)) / kSectorBytes);
          words.insert((lane.address + static_cast<std::uint64_t>(b)) / kCellBytes);
        }
      }
      totals.sectors += sectors.size();
      totals.least_sectors += (words.size() * kCellBytes + kSectorBytes - 1) / kSectorBytes;
      continue;
    }
    const int phases = bytes <= 4 ? 1 : bytes / 4, lanes_of_phase = ::emulator::kWarpSize / phases;
    for (int phase = 0; phase < phases; ++phase) {
      std::set<std::uint64_t> words[kBanks];
      for (const Lane& lane : lanes) {
        if (lane.lane / lanes_of_phase != phase) continue;
        for (int b = 0; b < lane.bytes; b += 4) {
          const std::uint64_t word = (lane.address + static_cast<std::uint64_t>(b)) / 4;
          words[word % kBanks].insert(word);
        }
      }
      std::size_t fullest = 0;
      for (const auto& bank : words) fullest = std::max(fullest, bank.size());
      totals.wavefronts += fullest;
      totals.least_wavefronts += fullest > 0 ? 1 : 0;
    }
  }
  warps_.clear();
}

void Watch::global_access(int site, std::uint64_t address, int bytes) {
  if (address % static_cast<std::uint64_t>(bytes) != 0) {
    ::emulator::Scheduler::instance().fail("a global access of " + std::to_string(bytes) + " bytes off its alignment");
  }
  note(site, address, bytes, false);
}

void Watch::shared_access(int site, std::uint32_t address, int bytes, bool writes) {
  if (address % static_cast<std::uint32_t>(bytes) != 0) {
    ::emulator::Scheduler::instance().fail("a shared access of " + std::to_string(bytes) + " bytes off its alignment");
  }
  touch(address, bytes, writes, writes ? "a write" : "a read", site);
  note(site, address, bytes, true);
}

void Watch::copy_begins(int site, std::uint32_t target, std::uint64_t source, int bytes, int target_bytes) {
  touch(target, target_bytes, true, "a copy", site);
  for (int b = 0; b < target_bytes; b += kCellBytes) {
    cells_[(target + static_cast<std::uint32_t>(b)) / kCellBytes].pending = true;
  }
  note(site, target, target_bytes, true);
  if (bytes > 0) {
    --me().visits[static_cast<std::size_t>(site)];  // the same visit, on its other side
    note(site, source, bytes, false);
  }
  me().begun.push_back({target, target_bytes});
}

void Watch::copies_committed() {
  Thread& thread = me();
  thread.groups.push_back(std::move(thread.begun));
  thread.begun.clear();
}

void Watch::copies_arrived(int pending) {
  Thread& thread = me();
  const int number = ::emulator::Scheduler::instance().thread();
  for (; thread.groups.size() > static_cast<std::size_t>(pending); thread.groups.pop_front()) {
    for (const Copy& copy : thread.groups.front()) {
      for (int b = 0; b < copy.bytes; b += kCellBytes) {
        Cell& cell = cells_[(copy.target + static_cast<std::uint32_t>(b)) / kCellBytes];
        cell.pending = false;
        cell.writer = number;
        cell.written = thread.stretch;
      }
    }
  }
}

void Watch::barrier_passed() { ++me().stretch; }

void Watch::report() {
  const char* path = std::getenv("PTX_REPORT");
  if (path == nullptr) return;
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return;
  std::string race;
  for (char c : first_race_) race += c == '"' || c == '\\' ? ' ' : c;
  std::fprintf(file, "{\"races\": %llu, \"first_race\": \"%s\", \"sites\": [", static_cast<unsigned long long>(num_races_),
               race.c_str());
  const char* comma = "";
  for (const auto& [name, totals] : totals_) {
    for (std::size_t i = 0; i < totals.size(); ++i) {
      const Totals& t = totals[i];
      const SiteName& site = kernels_[name].sites[i];
      std::fprintf(file,
                   "%s\n{\"kernel\": \"%s\", \"opcode\": \"%s\", \"line\": %d, \"accesses\": %llu, \"wavefronts\": %llu, "
                   "\"least_wavefronts\": %llu, \"sectors\": %llu, \"least_sectors\": %llu}",
                   comma, name.c_str(), site.opcode, site.line, static_cast<unsigned long long>(t.accesses),
                   static_cast<unsigned long long>(t.wavefronts), static_cast<unsigned long long>(t.least_wavefronts),
                   static_cast<unsigned long long>(t.sectors), static_cast<unsigned long long>(t.least_sectors));
      comma = ",";
    }
  }
  std::fprintf(file, "]}\n");
  std::fclose(file);
}

}  // namespace ptx
