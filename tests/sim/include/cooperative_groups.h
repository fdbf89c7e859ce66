// The grid barrier of cooperative launches.
#pragma once

#include "sim.h"

namespace cooperative_groups {

struct grid_group {
  void sync(sim::Where where = sim::Where::current()) const { sim::grid_barrier(where); }
};
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups
