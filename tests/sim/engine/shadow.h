// What is known of each word of shared and global memory: who wrote it last, and who has read it since. Every access
// is checked against both: what nothing orders is a data race.
#pragma once

#include "clocks.h"
#include "sim.h"

namespace sim {

struct Cta;

// A line of csrc: the address of an instruction, or of a std::source_location.
using Place = uint32_t;
Place place_of(const Where& where);

// An access: of the running thread, or of what it has issued at an earlier time.
struct Access {
  const char* what;
  Epoch epoch;
  Place place;
  const Past& past;
  const Clock* clock = nullptr;    // of a thread that makes the access itself
  bool async = false;              // of the async proxy
  bool sees_copies = false;        // what cp.async has written needs no proxy fence
  bool noted = true;               // false: a read that later writes are not compared with
  mutable Epoch known_write = {};  // the last one that came before
};

// --- global memory ---
void map_shadow(uintptr_t begin, size_t bytes);  // all of it lies there
void clear_shadow(uintptr_t begin, size_t bytes);
void mark_written(const void* address, int64_t bytes);  // by the host
void read_global(const void* address, int64_t bytes, const Access& access);
void write_global(const void* address, int64_t bytes, const Access& access);
// Whether it has been written, and the read comes after that.
bool is_ordered(const void* address, int64_t bytes, const Access& access);
void copy_global(const void* dst, const void* src, int64_t bytes,
                 const Access& access);  // padding may travel too
// Atomics, and what is .relaxed, .acquire or .release, of the running thread: no race among each other.
void strong_access(const void* address, int bytes, bool writes, const char* what, const Where& where);

// --- shared memory of a CTA ---
// `written_only`: reports what nobody has written.
void read_shared(Cta& cta, uint32_t address, int64_t bytes, const Access& access, bool written_only = true);
void write_shared(Cta& cta, uint32_t address, int64_t bytes, const Access& access);
void copy_unwritten(const Cta& from, uint32_t src, Cta& to, uint32_t dst, int64_t bytes);
void forget_shared(const Cta& cta);  // it exits

}  // namespace sim
