#pragma once

// address of a function of fn-host-pin.h by its name, or nullptr
void * fn_host_pin_proc(const char * name);
