#include "clocks.h"

#include <algorithm>
#include <array>

namespace sim {
namespace {

uint32_t actors = 0, first_actor = 1;  // of this run
int launches = 0;
// Of actors from first_actor on.
std::vector<int> launch_of;
std::vector<ActorInfo> infos;

// The last results, because many threads with the same knowledge learn the same.
struct Memo {
  Known a, b, result;
};
std::array<Memo, 4096> joins;
std::array<Memo, 256> fences;

bool bit(const std::vector<bool>& bits, int i) {
  return i >= 0 && i < static_cast<int>(bits.size()) && bits[i];
}

bool at_least(const Times& a, const Times& b) {
  const size_t size = std::min(a.of.size(), b.of.size());
  for (size_t i = 0; i < size; ++i) {
    if (a.of[i] < b.of[i]) return false;
  }
  for (size_t i = size; i < b.of.size(); ++i) {
    if (b.of[i] > 0) return false;
  }
  return true;
}

Ref<Times> latest(const Ref<Times>& a, const Ref<Times>& b) {
  if (a == b || at_least(*a, *b)) return a;
  if (at_least(*b, *a)) return b;
  Ref<Times> both(new Times(*a));
  if (both->of.size() < b->of.size()) both->of.resize(b->of.size());
  for (size_t i = 0; i < b->of.size(); ++i) both->of[i] = std::max(both->of[i], b->of[i]);
  return both;
}

void raise(Ref<Times>& times, int slot, uint32_t time) {
  const auto at = static_cast<size_t>(slot);
  if (times->references > 1) times = Ref<Times>(new Times{0, times->of});
  if (times->of.size() <= at) times->of.resize(at + 1);
  times->of[at] = std::max(times->of[at], time);
}

// Whether b adds nothing to a.
bool contains(const Knowledge& a, const Knowledge& b) {
  for (size_t i = 0; i < b.launches.size(); ++i) {
    if (b.launches[i] && !bit(a.launches, static_cast<int>(i))) return false;
  }
  auto x = a.entries.begin();
  for (const Knowledge::Entry& y : b.entries) {
    while (x != a.entries.end() && x->actor < y.actor) ++x;
    if (x != a.entries.end() && x->actor == y.actor) {
      if (!(x->all == y.all || at_least(*x->all, *y.all))) return false;
      if (!(x->fenced == y.fenced || at_least(*x->fenced, *y.fenced))) return false;
    } else if (!bit(a.launches, launch_of[y.actor - first_actor])) {
      return false;
    }
  }
  return true;
}

Memo& memo_of(const Known& a, const Known& b) {
  const auto hash = reinterpret_cast<uintptr_t>(a.get()) * 31 + reinterpret_cast<uintptr_t>(b.get());
  return joins[(hash >> 5 ^ hash >> 17) % joins.size()];
}

}  // namespace

void forget_clocks() {
  joins.fill({});
  fences.fill({});
  first_actor = actors + 1;
  launches = 0;
  launch_of.clear();
  infos.clear();
}

int new_launch() { return launches++; }

uint32_t new_actor(int launch, const std::string& name, int device, int threads) {
  launch_of.push_back(launch);
  infos.push_back({name, device, threads, {}});
  return ++actors;
}

int new_agent(uint32_t actor, Agent agent, int thread) {
  ActorInfo& info = infos[actor - first_actor];
  info.agents.emplace_back(agent, thread);
  return info.threads + static_cast<int>(info.agents.size()) - 1;
}

const ActorInfo* actor_info(uint32_t actor) {
  return actor < first_actor ? nullptr : &infos[actor - first_actor];
}

const Knowledge::Entry* Knowledge::find(uint32_t actor) const {
  const auto found = std::lower_bound(entries.begin(), entries.end(), actor,
                                      [](const Entry& entry, uint32_t of) { return entry.actor < of; });
  return found != entries.end() && found->actor == actor ? &*found : nullptr;
}

bool Knowledge::covers(Epoch epoch, bool fenced) const {
  if (epoch.actor() < first_actor) return true;
  const Entry* const entry = find(epoch.actor());
  if (entry == nullptr) return bit(launches, launch_of[epoch.actor() - first_actor]);
  const std::vector<uint32_t>& times = (fenced ? entry->fenced : entry->all)->of;
  const auto slot = static_cast<size_t>(epoch.slot());
  return slot < times.size() && times[slot] >= epoch.time();
}

Known join(const Known& a, const Known& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  Memo& memo = memo_of(a, b);
  if (memo.a == a && memo.b == b) return memo.result;
  if (contains(*a, *b)) return (memo = {a, b, a}).result;
  if (contains(*b, *a)) return (memo = {a, b, b}).result;
  Known both(new Knowledge);
  both->launches = a->launches;
  if (both->launches.size() < b->launches.size()) both->launches.resize(b->launches.size());
  for (size_t i = 0; i < b->launches.size(); ++i) {
    if (b->launches[i]) both->launches[i] = true;
  }
  auto x = a->entries.begin(), y = b->entries.begin();
  const auto add = [&](const Knowledge::Entry& entry) {
    if (!bit(both->launches, launch_of[entry.actor - first_actor])) both->entries.push_back(entry);
  };
  while (x != a->entries.end() || y != b->entries.end()) {
    if (y == b->entries.end() || (x != a->entries.end() && x->actor < y->actor)) {
      add(*x++);
    } else if (x == a->entries.end() || y->actor < x->actor) {
      add(*y++);
    } else {
      add({x->actor, latest(x->all, y->all), latest(x->fenced, y->fenced)});
      ++x;
      ++y;
    }
  }
  memo = {a, b, both};
  return both;
}

Known with(const Known& known, const std::vector<Stamp>& stamps) {
  if (stamps.empty()) return known;
  Known result(known ? new Knowledge{0, known->launches, known->entries} : new Knowledge);
  for (const Stamp& stamp : stamps) {
    auto at = std::lower_bound(result->entries.begin(), result->entries.end(), stamp.actor,
                               [](const Knowledge::Entry& entry, uint32_t of) { return entry.actor < of; });
    if (at == result->entries.end() || at->actor != stamp.actor) {
      if (bit(result->launches, launch_of[stamp.actor - first_actor])) continue;
      at = result->entries.insert(at, {stamp.actor, Ref<Times>(new Times), Ref<Times>(new Times)});
    }
    raise(at->all, stamp.slot, stamp.time);
    if (stamp.fenced > 0) raise(at->fenced, stamp.slot, stamp.fenced);
  }
  return result;
}

Known with_launch(const Known& known, int launch) {
  Known result(known ? new Knowledge{0, known->launches, {}} : new Knowledge);
  if (static_cast<int>(result->launches.size()) <= launch) result->launches.resize(launch + 1);
  result->launches[launch] = true;
  if (!known) return result;
  for (const Knowledge::Entry& entry : known->entries) {
    if (launch_of[entry.actor - first_actor] != launch) result->entries.push_back(entry);
  }
  return result;
}

Known all_fenced(const Known& known) {
  if (!known) return known;
  Memo& memo = fences[(reinterpret_cast<uintptr_t>(known.get()) >> 5) % fences.size()];
  if (memo.a == known) return memo.result;
  Known result(new Knowledge{0, known->launches, known->entries});
  for (Knowledge::Entry& entry : result->entries) entry.fenced = entry.all;
  memo = {known, {}, result};
  return result;
}

Known Gathering::told() {
  all = with(all, stamps);
  stamps.clear();
  return all;
}

}  // namespace sim
