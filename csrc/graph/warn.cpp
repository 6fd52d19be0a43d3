#include "graph/warn.h"

#include <c10/util/Exception.h>

namespace cudnn_ops::graph {
namespace {

std::atomic<Warner> current{nullptr};

}  // namespace

void set_warner(Warner warner) {
  current = warner;
}

void warn(const std::string& message) {
  if (const Warner warner = current) {
    warner(message.c_str());
  } else {
    TORCH_WARN(message);
  }
}

bool warns_always() {
  return c10::WarningUtils::get_warnAlways();
}

}  // namespace cudnn_ops::graph
