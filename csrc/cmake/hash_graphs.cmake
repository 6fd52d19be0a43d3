# Writes OUTPUT, a header that names the version of the graphs: a hash of the SOURCES (paths
# joined by "|") that say what a key's words mean and what is built from them. Run by the build
# whenever one of them changes, so that a stored plan of other graphs is not found any more.
string(REPLACE "|" ";" sources "${SOURCES}")
set(hashes "")
foreach(source IN LISTS sources)
  file(SHA256 "${source}" hash)
  get_filename_component(name "${source}" NAME)
  list(APPEND hashes "${name} ${hash}")
endforeach()
list(SORT hashes)
string(SHA256 hash "${hashes}")
string(SUBSTRING "${hash}" 0 16 hash)
file(WRITE "${OUTPUT}" "constexpr const char* kGraphs = \"${hash}\";\n")
