#pragma once

// address of a function of fn-phase-cuda.cu by its name, or nullptr
void * fn_phase_cuda_proc(const char * name);
