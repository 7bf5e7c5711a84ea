// Translated kernels by name, and what their memory accesses were like: races in shared memory, bank conflicts, sectors.
//
// A race is an access to two bytes of shared memory that another thread wrote, or a write where another one read, since
// the last barrier; or a read of what an asynchronous copy has not delivered. An access of a warp costs as many
// wavefronts as the fullest bank has different words, for 16-byte accesses in quarter warps, for 8-byte ones in halves;
// and as many sectors of 32 bytes of global memory as it touches.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace ptx {

struct SiteName {
  const char* opcode;
  int line;
};

struct Registration {
  Registration(const char* name, void (*run)(const void* const*), int static_bytes, const SiteName* sites,
               int num_sites);
};

class Watch {
 public:
  static Watch& instance();

  // Before a launch: the translation of this host-side kernel function, or an empty function when there is none.
  using Run = void (*)(const void* const*);
  Run begin_launch(const void* kernel);
  std::size_t shared_bytes(std::size_t dynamic_bytes) const;
  void begin_block();
  void end_launch();
  void report();  // to the file that PTX_REPORT names, as JSON

  // Below: what a thread says that it does.
  std::uint32_t dynamic_offset() const;
  void global_access(int site, std::uint64_t address, int bytes);
  void shared_access(int site, std::uint32_t address, int bytes, bool writes);
  void copy_begins(int site, std::uint32_t target, std::uint64_t source, int bytes, int target_bytes);
  void copies_committed();
  void copies_arrived(int pending);
  void barrier_passed();

 private:
  struct Kernel {
    Run run = nullptr;
    int static_bytes = 0;
    std::vector<SiteName> sites;
  };
  struct Totals {  // of one site, over warps
    std::uint64_t accesses = 0, wavefronts = 0, least_wavefronts = 0, sectors = 0, least_sectors = 0;
  };
  struct Lane {
    int lane, bytes;
    std::uint64_t address;
    bool shared;
  };
  struct Cell {  // two bytes of shared memory
    int writer = -1, reader = -1;  // -2: several
    std::uint32_t written = 0, read = 0;  // in which stretch between barriers, from 1
    bool pending = false;
  };
  struct Copy {
    std::uint32_t target;
    int bytes;
  };
  struct Thread {
    std::uint32_t stretch = 1;
    std::vector<std::uint32_t> visits;  // of each site
    std::vector<Copy> begun;
    std::deque<std::vector<Copy>> groups;
  };
  friend struct Registration;

  void touch(std::uint32_t address, int bytes, bool writes, const char* what, int site);
  void note(int site, std::uint64_t address, int bytes, bool shared);
  void count_warps();
  void race(const std::string& message);
  Thread& me();

  std::map<std::string, Kernel> kernels_;
  std::map<std::string, std::vector<Totals>> totals_;
  const Kernel* current_ = nullptr;
  std::string current_name_;
  std::vector<Cell> cells_;
  std::vector<Thread> threads_;
  std::map<std::uint64_t, std::vector<Lane>> warps_;  // site, warp and visit: its lanes
  std::uint64_t num_races_ = 0;
  std::string first_race_;
};

}  // namespace ptx
