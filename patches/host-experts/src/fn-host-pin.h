#pragma once

#include <stddef.h>

// What a backend offers, under these names, through ggml_backend_reg_get_proc_address.

// page-lock [ptr, ptr + size) for every device; false and a text on failure
typedef bool (*fn_host_pin_t)(void * ptr, size_t size, char * error, size_t error_size);

typedef void (*fn_host_unpin_t)(void * ptr);
