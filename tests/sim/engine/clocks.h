// Who knows of what: vector clocks. An access of memory is a race if whoever comes second does not know of the first.
//
// An actor is a CTA, or a stream. It has slots: its threads, and behind them all that accesses memory on their behalf:
// a thread's cp.async, its bulk copies, a warp's wgmmas, and for copies that complete on an mbarrier the mbarrier. Each
// slot has a time. Knowledge says for each slot up to which time its accesses come before; `fenced`, up to which time
// they also come before accesses of the async proxy (fence.proxy.async).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace sim {

// An actor, a slot, and its time. Actor 0 is the host.
struct Epoch {
  uint64_t bits = 0;  // 0: never

  static constexpr int kSlots = 1 << 12;
  static Epoch of(uint32_t actor, int slot, uint32_t time, bool strong = false) {
    return {uint64_t{actor} << 40 | static_cast<uint64_t>(slot) << 28 | uint64_t{time} << 1 | strong};
  }
  static Epoch of_host() { return {1}; }
  bool never() const { return bits == 0; }
  uint32_t actor() const { return static_cast<uint32_t>(bits >> 40); }
  int slot() const { return static_cast<int>(bits >> 28 & (kSlots - 1)); }
  uint32_t time() const { return static_cast<uint32_t>(bits >> 1 & 0x7FFFFFF); }
  bool strong() const {
    return bits & 1;
  }  // an atomic, or a load or store with .relaxed, .acquire or .release
  uint64_t who() const { return bits >> 28; }
};

// A pointer to an object that counts its references.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) { hold(); }
  Ref(const Ref& other) : object_(other.object_) { hold(); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr && --object_->references == 0) delete object_;
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  bool operator==(const Ref& other) const { return object_ == other.object_; }

 private:
  void hold() {
    if (object_ != nullptr) ++object_->references;
  }
  T* object_ = nullptr;
};

struct Times {
  int references = 0;
  std::vector<uint32_t> of;  // slots; those behind the end: 0
};

// Not changed once others can see it.
struct Knowledge {
  struct Entry {
    uint32_t actor;
    Ref<Times> all, fenced;
  };
  int references = 0;
  std::vector<bool> launches;  // all of these launches
  std::vector<Entry> entries;  // in the order of actors; of launches that are not known as a whole

  bool covers(Epoch epoch, bool fenced = false) const;
  const Entry* find(uint32_t actor) const;
};
using Known = Ref<Knowledge>;  // null: nothing

// A slot's time, and up to which time it is fenced.
struct Stamp {
  uint32_t actor;
  int slot;
  uint32_t time, fenced;
};

Known join(const Known& a, const Known& b);
Known with(const Known& known, const std::vector<Stamp>& stamps);
Known with_launch(const Known& known, int launch);
Known all_fenced(const Known& known);
inline bool covers(const Known& known, Epoch epoch, bool fenced = false) {
  return known && known->covers(epoch, fenced);
}

// What several threads tell, as at a barrier.
struct Gathering {
  Known all;
  std::vector<Stamp> stamps;
  // All that has been told until now. More may be told later.
  Known told();
};

// What comes before an access: all that its thread knows of others, and its own accesses.
struct Past {
  Known known;
  uint32_t actor = 0;
  int thread = 0;
  uint32_t now = 1;     // advances when the thread tells others, or issues what happens later
  uint32_t fenced = 0;  // its accesses until then come before accesses of the async proxy
  Stamp stamp() const { return {actor, thread, now, fenced}; }
};

// A thread's clock.
struct Clock : Past {
  Known pending;   // learned by relaxed loads and atomics: comes before stores, and before all behind a fence
  Known at_fence;  // what relaxed stores and atomics behind the last fence tell
  Known at_init;   // what fence.mbarrier_init shows to the cluster
  std::vector<Stamp> copied;  // complete bulk copies that a proxy fence has yet to order before what follows
};

// Who accesses memory for a CTA beside its threads.
enum class Agent { kCopies, kBulkReads, kBulkWrites, kBarrier };

struct ActorInfo {
  std::string name;
  int device, threads;
  std::vector<std::pair<Agent, int>>
      agents;  // and their threads; their slots are behind those of the threads

  // cp.async belongs to the proxy of ordinary accesses.
  bool is_copy(int slot) const { return slot >= threads && agents[slot - threads].first == Agent::kCopies; }
  bool is_generic(int slot) const { return slot < threads || is_copy(slot); }
};

// Actors and launches are numbered for the whole program. Nobody need know of those before the last call of
// forget_clocks.
void forget_clocks();
int new_launch();
uint32_t new_actor(int launch, const std::string& name, int device, int threads);  // launch -1: none
int new_agent(uint32_t actor, Agent agent, int thread);                            // its slot
const ActorInfo* actor_info(uint32_t actor);  // null: forgotten, or the host

}  // namespace sim
