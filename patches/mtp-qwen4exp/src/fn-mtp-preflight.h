#pragma once

#include "common.h"

// Reads the headers of the target and of the draft file, and refuses an MTP head that cannot belong to a qwen4exp
// target: before any weight is read, naming everything that differs (one line, marker `fn:mtp:refused {json}`).
// Returns false if refused. Other architectures and other kinds of drafts are none of its business: true.
bool fn_mtp_preflight(const common_params & params);
