// Warnings that reach Python's `warnings`. Torch's own handler does so only within its bindings,
// and operators are not called through those: what they warn of would go to stderr, past filters.
#pragma once

#include <c10/util/StringUtil.h>

#include <atomic>
#include <string>

namespace cudnn_ops::graph {

using Warner = void (*)(const char* message);

// Who gets the warnings from now on. Without one, as in a program without Python, torch does.
void set_warner(Warner warner);

// From any thread, with no lock held: Python runs, and may throw where warnings are errors.
void warn(const std::string& message);

// Whether warnings that are given once are given each time (torch.set_warn_always).
bool warns_always();

}  // namespace cudnn_ops::graph

// As TORCH_WARN_ONCE: its arguments together are the message, given once by each place that warns.
#define CUDNN_OPS_WARN_ONCE(...)                                         \
  do {                                                                   \
    static std::atomic<bool> is_said{false};                             \
    if (!is_said.exchange(true) || ::cudnn_ops::graph::warns_always()) { \
      ::cudnn_ops::graph::warn(c10::str(__VA_ARGS__));                   \
    }                                                                    \
  } while (false)
