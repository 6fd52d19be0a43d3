#include "graph/plan_record.h"

#include "graph/cudnn_library.h"
#include "graph_hash.h"

#include <cudnn_frontend_version.h>

#include <cstdio>
#include <cstring>

namespace cudnn_ops::graph {
namespace {

// Counts changes of the records' format. What is in a plan is told apart by kGraphs, a hash.
constexpr uint32_t kFormat = 2;
constexpr char kMagic[8] = {'c', 'u', 'D', 'N', 'N', 'o', 'p', 's'};

struct Header {
  char magic[8];
  uint32_t format;
  uint32_t identity_size;
  uint64_t plan_size;
  uint64_t checksum;  // of identity and plan
};

uint64_t fnv(const char* data, size_t size, uint64_t h = 0xCBF29CE484222325ull) {
  for (size_t i = 0; i < size; ++i)
    h = (h ^ static_cast<unsigned char>(data[i])) * 0x100000001B3ull;
  return h;
}

}  // namespace

std::string identity_of(const PlanKey& key, const std::string& gpu) {
  std::string identity = "cudnn " + std::to_string(cudnn().version) + ", frontend " +
                         std::to_string(CUDNN_FRONTEND_VERSION) + ", graphs " + kGraphs + ", gpu " +
                         gpu + '\0';
  identity.append(reinterpret_cast<const char*>(key.words().data()),
                  key.words().size() * sizeof(int64_t));
  return identity;
}

std::string name_of(const std::string& identity) {
  char name[33];
  const uint64_t first = fnv(identity.data(), identity.size());
  std::snprintf(name, sizeof name, "%016llx%016llx", static_cast<unsigned long long>(first),
                static_cast<unsigned long long>(fnv(identity.data(), identity.size(), ~first)));
  return name;
}

std::string make_record(const std::string& identity, const std::string& plan) {
  const std::string rest = identity + plan;
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.format = kFormat;
  header.identity_size = static_cast<uint32_t>(identity.size());
  header.plan_size = plan.size();
  header.checksum = fnv(rest.data(), rest.size());
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + rest;
}

std::optional<std::string> plan_in(const std::string& record, const std::string& identity) {
  Header header{};
  if (record.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, record.data(), sizeof header);
  const char* rest = record.data() + sizeof header;
  const size_t size = record.size() - sizeof header;
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.format != kFormat ||
      header.identity_size != identity.size() || header.identity_size + header.plan_size != size ||
      header.checksum != fnv(rest, size) ||
      record.compare(sizeof header, header.identity_size, identity) != 0) {
    return std::nullopt;
  }
  return record.substr(sizeof header + header.identity_size);
}

std::string graphs_version() {
  return kGraphs;
}

}  // namespace cudnn_ops::graph
