// What g++ leaves to a newer libstdc++ than manylinux_2_28's where it does not inline it, as on
// aarch64: made here, and hidden by the linker as all else is.
#include <sstream>

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11
template std::string std::stringbuf::str() const&;
#endif
