// Facts about the current GPU and the way to driver functions without linking libcuda: the library must load
// where there is no driver.
#pragma once

namespace flux::runtime {

int num_sms();                            // of the current device; cached
void* driver_function(const char* name);  // cuXxx entry point, or an error that says which driver it needs

}  // namespace flux::runtime
