// All atoms are in mma_sm90_gmma.hpp.
#pragma once
