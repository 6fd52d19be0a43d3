#include "graph/error.h"

#include "graph/cudnn_library.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <vector>

namespace cudnn_ops::graph {
namespace {

constexpr const char* kStatus = "CUDNN_STATUS_";
constexpr const char* kLine = "Warning: CUDNN_STATUS_";  // begins an engine's refusal

bool starts_with(const std::string& text, const std::string& start) {
  return text.rfind(start, 0) == 0;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// The name of the status that stands at `start`.
std::string status_at(const std::string& report, size_t start) {
  const auto end = std::find_if(report.begin() + start, report.end(),
                                [](unsigned char c) { return std::isalnum(c) == 0 && c != '_'; });
  return {report.begin() + start, end};
}

std::vector<std::string> statuses_behind(const std::string& report, const std::string& marker) {
  std::vector<std::string> statuses;
  for (size_t at = report.find(marker + kStatus); at != std::string::npos;
       at = report.find(marker + kStatus, at + 1)) {
    statuses.push_back(status_at(report, at + marker.size()));
  }
  return statuses;
}

// What cuDNN does not support, and errors that an engine meets each time. A library that it did not
// find is no property of the graph.
bool is_refusal_status(const std::string& status) {
  if (status == "CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING" ||
      status == "CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE") {
    return false;
  }
  return starts_with(status, "CUDNN_STATUS_NOT_SUPPORTED") ||
         starts_with(status, "CUDNN_STATUS_BAD_PARAM") ||
         status == "CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE";
}

// What one engine says of itself: its first line, from which the rest follows.
struct Verdict {
  std::string reason, status;
  int rank;  // how much it tells a reader
};

// A sentence, and not the expression of cuDNN's source that was true.
bool is_sentence(const std::string& reason) {
  return std::count(reason.begin(), reason.end(), ' ') >= 2 && !contains(reason, "==") &&
         !contains(reason, "!=") && !contains(reason, "&&") && !contains(reason, "(");
}

int rank_of(const Verdict& verdict) {
  if (!is_refusal_status(verdict.status)) return 5;
  // From engines for other graphs, of which there always are some. The last one is of those that
  // have no configuration for the graph (cuDNN 9.28 tells of them).
  if (contains(verdict.reason, "graph was not given") ||
      contains(verdict.reason, "does not support this graph pattern") ||
      contains(verdict.reason, "knob must be set")) {
    return 0;
  }
  const bool is_sentence = graph::is_sentence(verdict.reason);
  if (contains(verdict.status, "ARCH_MISMATCH")) return is_sentence ? 2 : 0;
  if (is_sentence) return 4;
  const bool is_named = verdict.status != "CUDNN_STATUS_NOT_SUPPORTED" &&
                        !contains(verdict.status, "GRAPH_PATTERN") &&
                        !contains(verdict.reason, "()");
  return is_named ? 3 : 0;
}

// "R" of "R at: C", where C is the condition in cuDNN's source.
std::string without_condition(const std::string& text) {
  std::string reason = text.substr(0, text.find(" at: "));
  while (!reason.empty() && std::isspace(static_cast<unsigned char>(reason.back())) != 0) {
    reason.pop_back();
  }
  return reason;
}

std::vector<Verdict> verdicts_in(const std::string& report) {
  std::vector<Verdict> verdicts;
  const std::string engine = "{\"engineId\":", reason = "; Reason: ";
  for (size_t at = report.find(engine); at != std::string::npos;) {
    const size_t next = report.find(engine, at + 1);
    const std::string part = report.substr(at, next - at);
    at = next;
    const size_t line = part.find(kLine), start = part.find(reason, line);
    if (line == std::string::npos || start == std::string::npos) continue;
    const size_t from = start + reason.size();
    const size_t end = std::min(part.find('\n', from), part.find(" Warning: ", from));
    Verdict verdict{without_condition(part.substr(from, end - from)),
                    status_at(part, line + std::string("Warning: ").size()), 0};
    verdict.rank = rank_of(verdict);
    verdicts.push_back(std::move(verdict));
  }
  return verdicts;
}

std::string in_brackets(const std::string& status) {
  return " (" + status + ")";
}

// No engine supports the graph: the most telling of their reasons.
std::string of_engines(const std::string& report) {
  const auto verdicts = verdicts_in(report);
  if (verdicts.empty()) return "cuDNN has no engine for this";
  const std::string none = "none of cuDNN's " + std::to_string(verdicts.size()) +
                           " engines for such graphs supports this";
  const auto best =
      std::max_element(verdicts.begin(), verdicts.end(),
                       [](const Verdict& a, const Verdict& b) { return a.rank < b.rank; });
  if (best->rank == 0) return none + in_brackets(best->status);
  return none + "; the most telling reason: " + best->reason + in_brackets(best->status);
}

// A call into cuDNN: its status, and what cuDNN wrote about it, if anything.
std::string of_call(const std::string& text, const std::string& status) {
  // cuDNN's last message may come from engines that were asked before.
  const std::string message = without_condition(text.substr(0, text.find("{\"engineId\":")));
  return message.empty() ? "cuDNN says " + status : message + in_brackets(status);
}

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == '.')) text.pop_back();
  return text.empty() ? "no reason given" : text;
}

}  // namespace

void check(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char detail[1024] = {};
  cudnn().last_error_string(detail, sizeof detail);
  throw CudnnError(std::string(call) + " failed with " + cudnn().error_string(status) +
                   (detail[0] != '\0' ? std::string(": ") + detail : std::string()));
}

bool is_refusal(const std::string& report, bool otherwise) {
  // The first two are of the call that failed; the last, of engines, may be older than that.
  for (const char* marker : {"cudnn_status: ", "and code: ", "Warning: "}) {
    const auto statuses = statuses_behind(report, marker);
    if (!statuses.empty()) {
      return std::all_of(statuses.begin(), statuses.end(), is_refusal_status);
    }
  }
  return otherwise;
}

std::string readable_reason(const std::string& report) {
  if (std::getenv("CUDNN_OPS_FULL_REASONS") != nullptr) return one_line(report);
  std::string reason = report.substr(0, report.find("; python engines declined"));
  reason = reason.substr(0, reason.find("Plan at index 1"));  // the others say the same
  for (const char* noise : {"[cudnn_frontend] ERROR: ", "[cudnn_frontend] Error: "}) {
    if (starts_with(reason, noise)) reason.erase(0, std::string(noise).size());
  }
  if (starts_with(reason, "No valid engine configs")) return of_engines(reason);
  if (contains(reason, "Deselecting execution plan")) {
    return "cuDNN has no engine for this that computes as torch's flags for deterministic "
           "algorithms and TF32 ask";
  }
  // "<descriptor>: <step> Failed<cuDNN's message> cudnn_status: <status>", as an exception.
  const std::string failed = "Failed", thrown = " cudnn_status: ";
  const size_t step = reason.find(failed), end = reason.rfind(thrown + kStatus);
  if (step != std::string::npos && end != std::string::npos && step < end) {
    const size_t from = step + failed.size();
    return one_line(
        of_call(reason.substr(from, end - from), status_at(reason, end + thrown.size())));
  }
  // "<call> failed with message: <cuDNN's message>, and code: <status>", as a value.
  const std::string message = "failed with message: ", code = ", and code: ";
  const size_t start = reason.find(message), stop = reason.rfind(code + kStatus);
  if (start != std::string::npos && stop != std::string::npos && start < stop) {
    const size_t from = start + message.size();
    return one_line(
        of_call(reason.substr(from, stop - from), status_at(reason, stop + code.size())));
  }
  return one_line(reason);
}

}  // namespace cudnn_ops::graph
