// Raynforce: a simulator in C++ as an environment. One header, C++17, no dependency; ZMQ where libzmq is installed (loaded when it is used).
//
//     struct Pendulum {
//       static raynforce::Spaces spaces() { return {{raynforce::box({3})}, raynforce::box({1}, -2, 2)}; }
//       void reset(std::uint64_t seed, raynforce::Obs obs);                          // write the first observation
//       raynforce::Step step(raynforce::Action action, raynforce::Obs obs);          // write the next one
//     };
//     int main(int argc, char** argv) { return raynforce::serve<Pendulum>(argc, argv); }
//
// A class with `static std::vector<raynforce::Agent> agents()` has several agents: see `serve` and examples/cpp/hunt.cpp.
// Then: raynforce train ppo ./pendulum --envs 64
//
// The wire is docs/protocol.md. From top to bottom: values (JSON, spaces, observations), the host's session without I/O, sockets, `Server`
// for engines that own their loop, `serve` for those that do not; between them `Policy`, which acts without Python; at the end `Client`,
// which asks a policy that `raynforce serve` serves.
#pragma once

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace raynforce {

inline constexpr const char* version = "0.1.0";

/// What the user or the other side did wrong: one line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// -- JSON ---------------------------------------------------------------------------------------------------------------

/// A JSON value. Missing keys read as null, so that settings have defaults: `config["gravity"].number(9.81)`.
class Json {
 public:
  enum class Type { null, boolean, number, text, list, object };

  Json() = default;
  Json(bool value) : type_(Type::boolean), number_(value) {}
  template <class T, std::enable_if_t<std::is_arithmetic_v<T> && !std::is_same_v<T, bool>, int> = 0>
  Json(T value) : type_(Type::number), number_(static_cast<double>(value)) {}
  Json(std::string value) : type_(Type::text), text_(std::move(value)) {}
  Json(const char* value) : Json(std::string(value)) {}
  Json(std::vector<Json> items) : type_(Type::list), items_(std::move(items)) {}

  static Json object(std::vector<std::pair<std::string, Json>> fields = {}) {
    Json json;
    json.type_ = Type::object;
    for (auto& [key, value] : fields) json.set(key, std::move(value));
    return json;
  }
  /// Reads a text of at most `depth` levels; throws `Error`. Files of Python may have `Infinity`, messages may not.
  static Json parse(std::string_view text, int depth = 16, bool infinity = false);

  Type type() const { return type_; }
  bool is_null() const { return type_ == Type::null; }
  double number(double otherwise = 0) const { return type_ == Type::number || type_ == Type::boolean ? number_ : otherwise; }
  bool boolean(bool otherwise = false) const { return type_ == Type::boolean ? number_ != 0 : otherwise; }
  const std::string& text(const std::string& otherwise = empty()) const { return type_ == Type::text ? text_ : otherwise; }
  const std::vector<Json>& items() const { return items_; }
  const std::vector<std::string>& keys() const { return keys_; }
  const Json& operator[](std::string_view key) const {
    for (std::size_t i = keys_.size(); i-- > 0;)
      if (keys_[i] == key) return items_[i];
    return nothing();
  }
  const Json& operator[](std::size_t index) const { return index < items_.size() ? items_[index] : nothing(); }
  void set(const std::string& key, Json value) {
    for (std::size_t i = 0; i < keys_.size(); ++i)
      if (keys_[i] == key) {
        items_[i] = std::move(value);
        return;
      }
    keys_.push_back(key);
    items_.push_back(std::move(value));
  }
  std::string dump() const;

 private:
  static const Json& nothing() {
    static const Json json;
    return json;
  }
  static const std::string& empty() {
    static const std::string text;
    return text;
  }

  Type type_ = Type::null;
  double number_ = 0;
  std::string text_;
  std::vector<std::string> keys_;
  std::vector<Json> items_;
};

namespace detail {

class JsonReader {
 public:
  JsonReader(std::string_view text, int depth, bool infinity) : text_(text), depth_(depth), infinity_(infinity) {}

  Json read() {
    Json json = value(0);
    space();
    if (at_ != text_.size()) fail("more follows after its end");
    return json;
  }

 private:
  [[noreturn]] static void fail(const char* why) { throw Error(std::string("not JSON: ") + why); }
  void space() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]) != nullptr && text_[at_] != '\0') ++at_;
  }
  bool take(char c) {
    space();
    if (at_ < text_.size() && text_[at_] == c) return ++at_, true;
    return false;
  }
  bool word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json value(int level) {
    if (level > depth_) fail("it is too deep");
    space();
    if (at_ == text_.size()) fail("it ends too soon");
    const char c = text_[at_];
    if (c == '{') return object(level);
    if (c == '[') return list(level);
    if (c == '"') return Json(string());
    if (word("true")) return Json(true);
    if (word("false")) return Json(false);
    if (word("null")) return Json();
    if (infinity_ && word("Infinity")) return Json(std::numeric_limits<double>::infinity());
    if (infinity_ && word("-Infinity")) return Json(-std::numeric_limits<double>::infinity());
    return number();
  }
  Json object(int level) {
    ++at_;
    Json json = Json::object();
    if (take('}')) return json;
    std::map<std::string, std::size_t> seen;
    std::vector<std::pair<std::string, Json>> fields;
    do {
      space();
      if (at_ == text_.size() || text_[at_] != '"') fail("a key is missing");
      std::string key = string();
      if (!take(':')) fail("a colon is missing");
      auto [place, fresh] = seen.emplace(key, fields.size());
      if (fresh)
        fields.emplace_back(std::move(key), value(level + 1));
      else
        fields[place->second].second = value(level + 1);
    } while (take(','));
    if (!take('}')) fail("a brace is missing");
    return Json::object(std::move(fields));
  }
  Json list(int level) {
    ++at_;
    std::vector<Json> items;
    if (take(']')) return Json(std::move(items));
    do items.push_back(value(level + 1));
    while (take(','));
    if (!take(']')) fail("a bracket is missing");
    return Json(std::move(items));
  }
  Json number() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != '\0' && std::strchr("+-0123456789.eE", text_[at_]) != nullptr) ++at_;
    const std::string digits(text_.substr(begin, at_ - begin));
    char* end = nullptr;
    const double found = std::strtod(digits.c_str(), &end);
    if (digits.empty() || *end != '\0') fail("a value is missing");
    return Json(found);
  }
  unsigned hex() {
    if (text_.size() - at_ < 4) fail("an escape ends too soon");
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = text_[at_++];
      const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
      if (digit < 0) fail("an escape is wrong");
      code = code * 16 + static_cast<unsigned>(digit);
    }
    return code;
  }
  std::string string() {
    ++at_;
    std::string text;
    while (true) {
      if (at_ == text_.size()) fail("a text does not end");
      const char c = text_[at_++];
      if (c == '"') return text;
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a text");
      if (c != '\\') {
        text += c;
        continue;
      }
      if (at_ == text_.size()) fail("a text does not end");
      const char escape = text_[at_++];
      if (escape == 'u')
        utf8(text, code_point());
      else if (escape != '\0' && std::strchr("\"\\/bfnrt", escape) != nullptr)
        text += unescaped(escape);
      else
        fail("an escape is wrong");
    }
  }
  static char unescaped(char c) {
    switch (c) {
      case 'b': return '\b';
      case 'f': return '\f';
      case 'n': return '\n';
      case 'r': return '\r';
      case 't': return '\t';
      default: return c;
    }
  }
  unsigned code_point() {
    const unsigned first = hex();
    if (first < 0xD800 || first > 0xDFFF) return first;
    if (first > 0xDBFF || !word("\\u")) fail("half a surrogate pair");
    const unsigned second = hex();
    if (second < 0xDC00 || second > 0xDFFF) fail("half a surrogate pair");
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }
  static void utf8(std::string& text, unsigned code) {
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else if (code < 0x800) {
      text += static_cast<char>(0xC0 | code >> 6);
      text += static_cast<char>(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      text += static_cast<char>(0xE0 | code >> 12);
      text += static_cast<char>(0x80 | (code >> 6 & 0x3F));
      text += static_cast<char>(0x80 | (code & 0x3F));
    } else {
      text += static_cast<char>(0xF0 | code >> 18);
      text += static_cast<char>(0x80 | (code >> 12 & 0x3F));
      text += static_cast<char>(0x80 | (code >> 6 & 0x3F));
      text += static_cast<char>(0x80 | (code & 0x3F));
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int depth_;
  bool infinity_;
};

inline void quote(std::string& out, const std::string& text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += escaped;
    } else {
      out += c;
    }
  }
  out += '"';
}

inline void write(std::string& out, const Json& json) {
  switch (json.type()) {
    case Json::Type::null: out += "null"; return;
    case Json::Type::boolean: out += json.boolean() ? "true" : "false"; return;
    case Json::Type::text: quote(out, json.text()); return;
    case Json::Type::number: {
      const double value = json.number();
      char digits[32];
      if (!std::isfinite(value))
        std::snprintf(digits, sizeof digits, "null");  // JSON has no infinity
      else if (value == std::floor(value) && std::fabs(value) < 9e15)
        std::snprintf(digits, sizeof digits, "%lld", static_cast<long long>(value));
      else
        std::snprintf(digits, sizeof digits, "%.17g", value);
      out += digits;
      return;
    }
    case Json::Type::list:
    case Json::Type::object: {
      const bool object = json.type() == Json::Type::object;
      out += object ? '{' : '[';
      for (std::size_t i = 0; i < json.items().size(); ++i) {
        if (i != 0) out += ',';
        if (object) quote(out, json.keys()[i]), out += ':';
        write(out, json.items()[i]);
      }
      out += object ? '}' : ']';
    }
  }
}

}  // namespace detail

inline Json Json::parse(std::string_view text, int depth, bool infinity) { return detail::JsonReader(text, depth, infinity).read(); }
inline std::string Json::dump() const {
  std::string out;
  detail::write(out, *this);
  return out;
}

// -- spaces -------------------------------------------------------------------------------------------------------------

enum class DType : std::uint8_t { u8, i8, u16, i16, u32, i32, u64, i64, f32, f64 };

namespace detail {
struct DTypeFacts {
  const char* name;
  std::size_t size;
};
inline constexpr DTypeFacts dtypes[] = {{"uint8", 1},  {"int8", 1},  {"uint16", 2}, {"int16", 2},   {"uint32", 4},
                                        {"int32", 4}, {"uint64", 8}, {"int64", 8}, {"float32", 4}, {"float64", 8}};
inline const DTypeFacts& facts(DType dtype) { return dtypes[static_cast<int>(dtype)]; }
inline std::size_t padded(std::size_t bytes) { return (bytes + 7) & ~std::size_t{7}; }
}  // namespace detail

template <class T>
constexpr DType dtype_of() {
  static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>, "use std::uint8_t for bool");
  if constexpr (std::is_floating_point_v<T>) {
    static_assert(sizeof(T) <= 8, "there is no long double on the wire");
    return sizeof(T) == 4 ? DType::f32 : DType::f64;
  } else {
    constexpr int power = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 2 : sizeof(T) == 4 ? 4 : 6;
    return static_cast<DType>(power + (std::is_signed_v<T> ? 1 : 0));
  }
}

/// One array of an observation, or the action.
struct Leaf {
  std::string kind;
  std::vector<std::size_t> shape;
  DType dtype = DType::f32;
  std::vector<std::int64_t> sizes, start;  // of the discrete kinds: how many values each element has, and the smallest
  std::vector<double> low, high;           // of a box action
  std::size_t stack = 1;                   // frames joined along the first axis, the newest last
  std::string path = "obs";

  std::size_t elements() const {
    std::size_t product = 1;
    for (const std::size_t size : shape) product *= size;
    return product;
  }
  std::size_t bytes() const { return elements() * detail::facts(dtype).size; }
  /// The same array as entry `name` of an observation that is a dictionary; nested ones are `a/b`.
  Leaf named(const std::string& name) const {
    Leaf leaf = *this;
    leaf.path = "obs/" + name;
    return leaf;
  }
};

/// Numbers of type `T`; `box<std::uint8_t>({84, 84, 4})` is an image.
template <class T = float>
Leaf box(std::vector<std::size_t> shape) {
  Leaf leaf;
  leaf.kind = "box", leaf.shape = std::move(shape), leaf.dtype = dtype_of<T>();
  return leaf;
}
/// The same with bounds, for actions.
template <class T = float>
Leaf box(std::vector<std::size_t> shape, double low, double high) {
  Leaf leaf = box<T>(std::move(shape));
  leaf.low.assign(leaf.elements(), low), leaf.high.assign(leaf.elements(), high);
  return leaf;
}
/// One of `count` choices, from `start`.
inline Leaf discrete(std::int64_t count, std::int64_t start = 0) {
  Leaf leaf;
  leaf.kind = "discrete", leaf.dtype = DType::i64, leaf.sizes = {count}, leaf.start = {start};
  return leaf;
}
/// Several choices at once.
inline Leaf multidiscrete(std::vector<std::int64_t> counts) {
  Leaf leaf;
  leaf.kind = "multidiscrete", leaf.dtype = DType::i64, leaf.shape = {counts.size()};
  leaf.start.assign(counts.size(), 0), leaf.sizes = std::move(counts);
  return leaf;
}

/// Which choices of `action` are allowed, 1 or 0 for each: an entry `action_mask` of an observation that is a dictionary. A policy never
/// takes one that is not, and does not see it otherwise.
inline Leaf action_mask(const Leaf& action) {
  Leaf leaf;
  std::int64_t choices = 0;
  for (const std::int64_t size : action.sizes) choices += size;
  leaf.kind = "multibinary", leaf.dtype = DType::u8, leaf.shape = {static_cast<std::size_t>(choices)};
  return leaf.named("action_mask");
}

/// What the policy sees, and what it does.
struct Spaces {
  std::vector<Leaf> obs;
  Leaf action;
  Json agents = {};  // of several agents in one env, whose observation and action this is: see `Agents`

  /// Throws `Error` if the policy could not take them.
  void check() const;
  Json json() const;
  /// The text whose SHA-256 is `spec_hash`.
  std::string canonical() const;
};

namespace detail {

template <class T>
Json json_list(const std::vector<T>& values) {
  std::vector<Json> items;
  for (const T& value : values) items.emplace_back(static_cast<double>(value));
  return Json(std::move(items));
}

inline Json leaf_json(const Leaf& leaf, bool observation) {
  Json json = Json::object();
  if (observation) json.set("path", leaf.path);
  json.set("kind", leaf.kind);
  json.set("shape", json_list(leaf.shape));
  json.set("dtype", facts(leaf.dtype).name);
  if (leaf.kind != "box") json.set("sizes", json_list(leaf.sizes)), json.set("start", json_list(leaf.start));
  if (!observation && leaf.kind == "box" && !leaf.low.empty()) json.set("low", json_list(leaf.low)), json.set("high", json_list(leaf.high));
  if (leaf.stack != 1) json.set("stack", leaf.stack);
  return json;
}

template <class T>
std::string joined(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

inline std::string hex_doubles(std::vector<double> values, std::size_t count, double otherwise) {
  values.resize(count, otherwise);
  std::string text;
  for (const double value : values) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, 8);
    char digits[20];
    std::snprintf(digits, sizeof digits, "%s%016llx", text.empty() ? "" : ",", static_cast<unsigned long long>(bits));
    text += digits;
  }
  return text;
}

inline std::string leaf_line(const Leaf& leaf) {
  return leaf.kind + " " + facts(leaf.dtype).name + " shape=" + joined(leaf.shape) + " sizes=" + joined(leaf.sizes) + " start=" + joined(leaf.start);
}

/// SHA-256 (FIPS 180-4) of a short text.
inline std::string sha256(std::string_view text) {
  static constexpr std::uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
      0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
      0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
      0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
      0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
      0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string data(text);
  data += '\x80';
  while (data.size() % 64 != 56) data += '\0';
  const std::uint64_t bits = std::uint64_t{text.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) data += static_cast<char>(bits >> shift & 0xFF);
  const auto rotate = [](std::uint32_t x, int n) { return x >> n | x << (32 - n); };
  for (std::size_t block = 0; block < data.size(); block += 64) {
    std::uint32_t w[64];
    for (std::size_t i = 0; i < 16; ++i) {
      const auto* p = reinterpret_cast<const unsigned char*>(data.data()) + block + 4 * i;
      w[i] = std::uint32_t{p[0]} << 24 | std::uint32_t{p[1]} << 16 | std::uint32_t{p[2]} << 8 | p[3];
    }
    for (int i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    std::uint32_t s[8];
    std::copy(h, h + 8, s);
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t one = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
      const std::uint32_t two = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::copy_backward(s, s + 7, s + 8);
      s[4] += one, s[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) h[i] += s[i];
  }
  std::string digest;
  for (const std::uint32_t word : h)
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift & 0xFF);
  return digest;
}

inline std::string hmac_sha256(std::string key, std::string_view text) {
  if (key.size() > 64) key = sha256(key);
  key.resize(64, '\0');
  std::string inner, outer;
  for (const char c : key) inner += static_cast<char>(c ^ 0x36), outer += static_cast<char>(c ^ 0x5C);
  return sha256(outer + sha256(inner + std::string(text)));
}

inline std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes)
    for (const int shift : {4, 0}) text += "0123456789abcdef"[static_cast<unsigned char>(c) >> shift & 0xF];
  return text;
}

inline std::string unhex(const std::string& text) {
  if (text.size() % 2 != 0 || text.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos)
    throw Error("the token is not a text of hex digits");
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); i += 2) bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

}  // namespace detail

inline void Spaces::check() const {
  if (obs.empty() || obs.size() > 256) throw Error("an observation has 1 to 256 leaves; this one has " + std::to_string(obs.size()));
  std::map<std::string, int> paths;
  const auto check = [](const Leaf& leaf, const std::string& what) {
    const bool box = leaf.kind == "box";
    if (!box && leaf.kind != "discrete" && leaf.kind != "multidiscrete" && leaf.kind != "multibinary")
      throw Error(what + " has no kind: make it with box, discrete or multidiscrete");
    if (leaf.shape.size() > 8) throw Error(what + " has more than 8 dimensions");
    for (const std::size_t size : leaf.shape)
      if (size == 0) throw Error(what + " has a dimension of size 0");
    for (const std::int64_t size : leaf.sizes)
      if (size < 1) throw Error(what + " has no choices");
    if (!box && leaf.kind != "multibinary" && leaf.sizes.size() != leaf.elements()) throw Error(what + " has sizes that do not fit its shape");
  };
  for (const Leaf& leaf : obs) {
    check(leaf, "observation leaf " + leaf.path);
    if (leaf.path != "obs" && leaf.path.rfind("obs/", 0) != 0) throw Error("observation leaf " + leaf.path + " must be named obs or obs/NAME");
    if (paths[leaf.path]++ != 0) throw Error("two observation leaves are named " + leaf.path + ": use .named(\"...\")");
  }
  check(action, "the action");
}

inline Json Spaces::json() const {
  std::vector<Json> leaves;
  for (const Leaf& leaf : obs) leaves.push_back(detail::leaf_json(leaf, true));
  return Json::object({{"obs", Json(std::move(leaves))}, {"action", detail::leaf_json(action, false)}});
}

inline std::string Spaces::canonical() const {
  std::string text;
  for (const Leaf& leaf : obs) text += leaf.path + " " + detail::leaf_line(leaf) + " stack=" + std::to_string(leaf.stack) + "\n";
  text += "action " + detail::leaf_line(action);
  const std::size_t bounds = action.kind == "box" ? action.elements() : 0;
  const double infinity = std::numeric_limits<double>::infinity();
  return text + " low=" + detail::hex_doubles(action.low, bounds, -infinity) + " high=" + detail::hex_doubles(action.high, bounds, infinity) + "\n";
}

// -- what an env reads and writes ---------------------------------------------------------------------------------------

/// Where one env's observation is written: each leaf in place, row-major.
class Obs {
 public:
  Obs(const std::vector<Leaf>* leaves, std::uint8_t* const* rows, std::size_t env) : leaves_(leaves), rows_(rows), env_(env) {}

  /// The array of a leaf, by its place in `Spaces::obs`.
  template <class T = float>
  T* data(std::size_t leaf = 0) const {
    const Leaf& found = leaves_->at(leaf);
    if (found.dtype != dtype_of<T>())
      throw Error("observation leaf " + found.path + " is " + detail::facts(found.dtype).name + ", not " + detail::facts(dtype_of<T>()).name);
    return reinterpret_cast<T*>(rows_[leaf] + env_ * found.bytes());
  }
  /// The same as bytes, of whatever type it is.
  std::uint8_t* bytes(std::size_t leaf) const { return rows_[leaf] + env_ * leaves_->at(leaf).bytes(); }
  /// Its elements, for a range-based loop or an assignment: `obs[2] = 0.5f` of a single leaf of floats.
  float& operator[](std::size_t i) const { return data<float>()[i]; }

 private:
  const std::vector<Leaf>* leaves_;
  std::uint8_t* const* rows_;
  std::size_t env_;
};

/// What the policy chose: `start` added, clipped to the bounds.
class Action {
 public:
  Action(const Leaf* leaf, const std::uint8_t* row) : leaf_(leaf), row_(row) {}

  template <class T = float>
  const T* data() const {
    if (leaf_->dtype != dtype_of<T>())
      throw Error(std::string("the action is ") + detail::facts(leaf_->dtype).name + ", not " + detail::facts(dtype_of<T>()).name);
    return reinterpret_cast<const T*>(row_);
  }
  std::size_t size() const { return leaf_->elements(); }
  /// Element `i` of a box of floats.
  float operator[](std::size_t i) const { return data<float>()[i]; }
  /// The choice of a discrete action, or the `i`-th of several.
  std::int64_t choice(std::size_t i = 0) const { return data<std::int64_t>()[i]; }

 private:
  const Leaf* leaf_;
  const std::uint8_t* row_;
};

/// The outcome of a step.
struct Step {
  double reward = 0;
  bool terminated = false;  // the task is over: it has no future
  bool truncated = false;   // the episode is cut, by a limit of time
  std::vector<std::pair<std::string, double>> info = {};  // numbers of an episode that ends, such as {"is_success", 1}
};

/// What the policy asks of one env. `save` is answered by `submit_state`; `load`, as the others, by `submit`, with the observation in place.
struct Request {
  enum class Kind { reset, step, save, load };
  Kind kind;
  std::uint32_t env;
  std::uint64_t seed;  // of the episode that begins
  Action action;
  std::string state = {};  // load: the bytes that were saved
};

/// Values as bytes, for `save`: numbers, enums and plain structs.
template <class... Values>
std::string pack(const Values&... values) {
  static_assert((std::is_trivially_copyable_v<Values> && ...), "only values that may be copied as bytes");
  std::string bytes;
  (bytes.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
  return bytes;
}

/// The same values again, for `load`; throws if there are more or fewer bytes.
template <class... Values>
void unpack(const std::string& bytes, Values&... values) {
  static_assert((std::is_trivially_copyable_v<Values> && ...), "only values that may be copied as bytes");
  if (bytes.size() != (sizeof(Values) + ... + 0)) throw Error("a state of " + std::to_string(bytes.size()) + " bytes is not one of this simulator's");
  const char* from = bytes.data();
  ((std::memcpy(&values, from, sizeof values), from += sizeof values), ...);
}

// -- several agents -----------------------------------------------------------------------------------------------------

/// One of several agents in an env: what it sees and does.
struct Agent {
  std::string name;
  Spaces spaces;
};

/// Who takes part in an env, and where each agent's part is in the observation and action of all.
struct Cast {
  /// With `turns` only those act whose turn it is, else all that are there; `state` is the width of the global state, if there is one.
  explicit Cast(std::vector<Agent> agents, bool in_turns = false, std::size_t state = 0);

  struct Place {
    std::size_t kind, row, column;  // its kind, its row among those of that kind, and where its action begins
  };
  std::vector<Agent> all;
  bool turns;
  Spaces spaces;                    // of all of them, for `Server`
  std::vector<Place> places;        // of each agent
  std::vector<std::size_t> firsts;  // the first leaf of each kind
};

/// The agents of one env: what each does in a step, and what it then sees and earns. All are there when an episode begins; it ends when none
/// is left. What is not written stays as it was.
class Agents {
 public:
  explicit Agents(const Cast& cast) : cast_(&cast), here_(cast.all.size()), was_here_(here_.size()), acts_(here_.size()) {
    for (const Leaf& leaf : cast.spaces.obs) memory_.emplace_back(leaf.bytes()), rows_.push_back(memory_.back().data());
    for (const Agent& agent : cast.all) actions_.emplace_back(agent.spaces.action.bytes());
  }
  Agents(const Agents&) = delete;
  Agents& operator=(const Agents&) = delete;

  std::size_t size() const { return here_.size(); }
  /// Whether it is in the episode.
  bool here(std::size_t agent) const { return here_.at(agent) != 0; }
  /// In a step: whether it has chosen an action; those of others mean nothing.
  bool acts(std::size_t agent) const { return acts_.at(agent) != 0; }
  Action action(std::size_t agent) const { return Action(&cast_->all.at(agent).spaces.action, actions_[agent].data()); }

  /// Where what it sees is written.
  Obs obs(std::size_t agent) const {
    const Cast::Place& place = cast_->places.at(agent);
    return Obs(&cast_->all[agent].spaces.obs, rows_.data() + cast_->firsts[place.kind], place.row);
  }
  /// Where the global state is written.
  float* state() { return reinterpret_cast<float*>(memory_.back().data()); }
  /// It earns so much more in this step. Who is not there earns nothing.
  void reward(std::size_t agent, double more) {
    if (was_here_.at(agent) != 0) rewards()[agent] += static_cast<float>(more);
  }
  /// Its episode ends: it has terminated, or was `truncated`, by a limit of time. At a reset: it is not there yet.
  void leave(std::size_t agent, bool truncated = false) {
    if (here(agent) && !resets_) flags(truncated ? 2 : 1)[agent] = 1;
    here_[agent] = 0;
  }
  /// The same for all that are there.
  void end(bool truncated = false) {
    for (std::size_t i = 0; i < size(); ++i) leave(i, truncated);
  }
  /// It is there from now on.
  void enter(std::size_t agent) {
    if (!here(agent) && (flags(1)[agent] != 0 || flags(2)[agent] != 0)) throw Error("agent " + cast_->all[agent].name + " left in this step: it may come back in the next");
    here_[agent] = 1;
  }
  /// With turns: it is to act next. There may be several.
  void turn(std::size_t agent) {
    if (!cast_->turns) throw Error("all agents act in each step: turn(agent) is for a class with `static constexpr bool turns = true`");
    if (!here(agent)) throw Error("it is the turn of agent " + cast_->all.at(agent).name + ", who is not there");
    flags(0)[agent] = 1;
  }

  // For engines that own their loop: `begin` at a reset, `take` before a step; `show` then writes for `Server::submit`. `saved` and `load` are
  // for snapshots.

  void begin() {
    const std::vector<Leaf>& leaves = cast_->spaces.obs;
    for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
      std::fill(memory_[leaf].begin(), memory_[leaf].end(), std::uint8_t{0});
      for (std::size_t i = 0; i < leaves[leaf].start.size(); ++i)
        if (leaves[leaf].start[i] != 0) put(leaves[leaf].dtype, memory_[leaf].data(), i, static_cast<double>(leaves[leaf].start[i]));
    }
    std::fill(here_.begin(), here_.end(), std::uint8_t{1});
    was_here_.assign(size(), 0), acts_.assign(size(), 0), resets_ = true;
  }
  void take(Action action) {
    acts_.assign(flags(0), flags(0) + size()), was_here_ = here_, resets_ = false;
    std::fill(memory_[0].begin(), memory_[0].end(), std::uint8_t{0});
    std::fill(memory_[1].begin(), memory_[1].end(), std::uint8_t{0});
    for (std::size_t agent = 0; agent < size(); ++agent) {
      const Leaf& leaf = cast_->all[agent].spaces.action;
      for (std::size_t i = 0; i < leaf.elements(); ++i) put(leaf.dtype, actions_[agent].data(), i, static_cast<double>(action[cast_->places[agent].column + i]));
    }
  }
  Step show(Obs obs) {
    bool there = false, acting = false;
    double total = 0;
    for (std::size_t agent = 0; agent < size(); ++agent) {
      if (!cast_->turns || here_[agent] == 0) flags(0)[agent] = here_[agent];
      there |= here_[agent] != 0, acting |= flags(0)[agent] != 0, total += static_cast<double>(rewards()[agent]);
    }
    if (!acting && (there || resets_)) throw Error(there ? "it is nobody's turn: call turn(agent)" : "no agent is there after the reset");
    write(obs);
    return {total, !there, false};
  }
  std::string saved() const {
    std::string bytes(here_.begin(), here_.end());
    for (const std::vector<std::uint8_t>& leaf : memory_) bytes.append(leaf.begin(), leaf.end());
    return bytes;
  }
  /// Reads what was `saved`, the first bytes of a state, and shows it; how many these are.
  std::size_t load(const std::string& state, Obs obs) {
    std::size_t at = size();
    for (const std::vector<std::uint8_t>& leaf : memory_) at += leaf.size();
    if (state.size() < at) throw Error("a state of " + std::to_string(state.size()) + " bytes is not one of this simulator's");
    const char* from = state.data();
    std::memcpy(here_.data(), from, size()), from += size();
    for (std::vector<std::uint8_t>& leaf : memory_) std::memcpy(leaf.data(), from, leaf.size()), from += leaf.size();
    write(obs);
    return at;
  }

 private:
  void write(Obs obs) const {
    for (std::size_t leaf = 0; leaf < memory_.size(); ++leaf) std::memcpy(obs.bytes(leaf), memory_[leaf].data(), memory_[leaf].size());
  }
  float* rewards() { return reinterpret_cast<float*>(memory_[0].data()); }
  std::uint8_t* flags(std::size_t row) { return memory_[1].data() + row * size(); }  // who acts next, has terminated, was truncated
  template <class T>
  static void put_as(std::uint8_t* to, std::size_t i, double value) {
    T element;
    if constexpr (std::is_integral_v<T>)
      element = static_cast<T>(std::llround(value));
    else
      element = static_cast<T>(value);
    std::memcpy(to + i * sizeof element, &element, sizeof element);
  }
  static void put(DType dtype, std::uint8_t* to, std::size_t i, double value) {
    switch (dtype) {
      case DType::u8: return put_as<std::uint8_t>(to, i, value);
      case DType::i8: return put_as<std::int8_t>(to, i, value);
      case DType::u16: return put_as<std::uint16_t>(to, i, value);
      case DType::i16: return put_as<std::int16_t>(to, i, value);
      case DType::u32: return put_as<std::uint32_t>(to, i, value);
      case DType::i32: return put_as<std::int32_t>(to, i, value);
      case DType::u64: return put_as<std::uint64_t>(to, i, value);
      case DType::i64: return put_as<std::int64_t>(to, i, value);
      case DType::f32: return put_as<float>(to, i, value);
      case DType::f64: return put_as<double>(to, i, value);
    }
  }

  const Cast* cast_;
  std::vector<std::uint8_t> here_, was_here_, acts_;
  std::vector<std::vector<std::uint8_t>> memory_, actions_;  // each leaf of the observation of all; the action of each
  std::vector<std::uint8_t*> rows_;
  bool resets_ = true;
};

inline Cast::Cast(std::vector<Agent> agents, bool in_turns, std::size_t state) : all(std::move(agents)), turns(in_turns) {
  if (all.empty()) throw Error("there are no agents");
  std::vector<std::vector<std::size_t>> members;
  std::vector<std::string> kinds;
  std::map<std::string, int> names;
  std::size_t column = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    Agent& agent = all[i];
    if (agent.name.empty() || names[agent.name]++ != 0) throw Error(agent.name.empty() ? "an agent has no name" : "two agents are named " + agent.name);
    try {
      agent.spaces.check();
    } catch (const Error& error) {
      throw Error("agent " + agent.name + ": " + error.what());
    }
    for (Leaf& leaf : agent.spaces.obs) leaf.stack = 1;  // frames of agents that come and go do not follow each other
    const std::string text = agent.spaces.canonical();
    const std::size_t kind = static_cast<std::size_t>(std::find(kinds.begin(), kinds.end(), text) - kinds.begin());
    if (kind == kinds.size()) kinds.push_back(text), members.emplace_back();
    places.push_back({kind, members[kind].size(), column});
    members[kind].push_back(i), column += agent.spaces.action.elements();
  }
  Leaf flags;
  flags.kind = "multibinary", flags.dtype = DType::u8, flags.shape = {3, all.size()};
  spaces.obs = {box({all.size()}).named("reward"), flags.named("flags")};
  std::vector<Json> told, called;
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    const Spaces& one = all[members[kind][0]].spaces;
    firsts.push_back(spaces.obs.size());
    for (std::size_t i = 0; i < one.obs.size(); ++i) {
      Leaf leaf = one.obs[i].named("seen_" + std::to_string(kind) + "_" + std::to_string(i));
      if (leaf.kind == "discrete") leaf.kind = "multidiscrete";
      leaf.shape.insert(leaf.shape.begin(), members[kind].size());
      leaf.sizes.clear(), leaf.start.clear();
      for (std::size_t row = 0; row < members[kind].size(); ++row) {
        leaf.sizes.insert(leaf.sizes.end(), one.obs[i].sizes.begin(), one.obs[i].sizes.end());
        leaf.start.insert(leaf.start.end(), one.obs[i].start.begin(), one.obs[i].start.end());
      }
      spaces.obs.push_back(leaf);
    }
    Json json = one.json();
    json.set("agents", detail::json_list(members[kind]));
    told.push_back(json);
  }
  if (state != 0) spaces.obs.push_back(box({state}).named("state"));
  spaces.action = box({column});
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Agent& agent : all) {
    const Leaf& leaf = agent.spaces.action;
    called.emplace_back(agent.name);
    for (std::size_t i = 0; i < leaf.elements(); ++i) {
      const bool bounded = leaf.kind == "box" && !leaf.low.empty();
      const double first = leaf.sizes.empty() ? -infinity : static_cast<double>(leaf.start[i]);
      const double last = leaf.sizes.empty() ? infinity : first + static_cast<double>(leaf.sizes[i] - 1);
      spaces.action.low.push_back(bounded ? leaf.low[i] : first), spaces.action.high.push_back(bounded ? leaf.high[i] : last);
    }
  }
  spaces.agents = Json::object({{"names", Json(std::move(called))}, {"turns", turns}, {"kinds", Json(std::move(told))}, {"state", state}});
  spaces.check();
}

// -- the host's session, without I/O ------------------------------------------------------------------------------------

/// Who this is, and what proves it.
struct Identity {
  std::string name = "simulator", version = "0";
  std::string launch, token;  // of the trainer that started it: a nonce, and a key that never crosses the wire
  int host = -1;              // which of its simulators, if it said so
  bool shares_memory = false; // whether the transport can pass a file descriptor: a Unix socket
  bool waits = false;         // for a trainer that wants it, without limit
  bool saves = false;         // whether envs can be saved and loaded; `serve` sees it by their class
  bool realtime = false;      // whether envs go on while the trainer asks for nothing: such steps are counted, not recorded
};

/// How a session ended.
struct Ended {
  std::string code;  // closed, over, refused, replaced, dropped (while it chose its own actions), violation, silent, lost
  std::string text;
};

namespace detail {

static_assert(sizeof(float) == 4 && sizeof(double) == 8, "the wire has IEEE floats");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little-endian, and this header copies arrays as they are"
#endif

enum Type : std::uint8_t { HELLO = 1, WELCOME, REJECT, RESET, STEP, RESULT, ERROR, PING, PONG, LOG, CLOSE, SNAPSHOT, RESTORE, POLICY, SAMPLE, FRAGMENT };

/// The fixed part of a message, as it lies on the wire.
struct Header {
  char magic[4] = {'R', 'A', 'Y', 'N'};
  std::uint8_t major = 1, minor = 0, type = 0, flags = 0;
  std::uint64_t session = 0, sequence = 0;
  std::uint32_t envs = 0, ended = 0;
  std::uint16_t buffers = 0, reserved = 0;
  std::uint32_t meta_bytes = 0;
  std::uint64_t body_bytes = 0;
};
static_assert(sizeof(Header) == 48, "no padding");

struct Violation : Error {
  Violation(std::string code_, const std::string& text) : Error(text), code(std::move(code_)) {}
  std::string code;
};

inline constexpr std::uint8_t TERMINATED = 1, TRUNCATED = 2, FIRST = 4, BROKE = 8;  // in a FRAGMENT, FIRST is an episode's first step
inline constexpr std::uint8_t EPISODES = 1, TIMING = 2, SEEDS = 1;  // flags of RESULT and RESET
inline constexpr std::size_t GREETING_META = 1 << 18, OTHER_META = 1 << 14, UNKNOWN_BODY = 1 << 16, MOST_ENVS = 65536;
inline constexpr std::size_t MOST_STATE = 1 << 26, MOST_BODY = 1 << 30;

inline std::string one_line(std::string text, std::size_t most = 4000) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  if (text.size() > most) {
    text.resize(most);
    while (!text.empty() && (static_cast<unsigned char>(text.back()) & 0xC0) == 0x80) text.pop_back();  // no half a character
    if (!text.empty() && static_cast<unsigned char>(text.back()) >= 0xC0) text.pop_back();
  }
  return text;
}

inline std::string why(const std::string& what) { return what + ": " + std::strerror(errno); }

inline std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

/// What goes before an env's own bytes in its saved state: where its random stream and its episode are.
struct StateHead {
  char tag[4] = {'R', 'S', 'I', 'M'};
  std::uint32_t length = 0;
  std::uint64_t stream = 0;
  double total = 0;
  std::uint64_t check = 0;  // of all other bytes
};
static_assert(sizeof(StateHead) == 32, "no padding");

inline std::uint64_t checksum(StateHead head, const char* bytes, std::size_t count) {
  head.check = count;
  std::uint64_t found = 0;
  const auto take = [&](const char* from, std::size_t many) {
    for (std::size_t at = 0; at < many; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, from + at, std::min<std::size_t>(8, many - at));
      found = mixed(found ^ word);
    }
  };
  take(reinterpret_cast<const char*>(&head), sizeof head);
  take(bytes, count);
  return found;
}

/// Chooses actions in the trainer's place and gathers fragments, with the capability `inference`. `Policy` is defined further down.
struct Gatherer {
  struct Part {
    const void* data;
    std::size_t bytes;
  };
  virtual ~Gatherer() = default;
  virtual std::size_t policy_bytes() const = 0;
  virtual std::size_t policy_buffers() const = 0;
  virtual void set(const Json& meta, const std::uint8_t* body) = 0;
  virtual void ask(const Json& meta, std::uint64_t sequence) = 0;
  /// The first observation of the first episode is there.
  virtual void begin(std::size_t env) = 0;
  /// Whether the env may take a step now.
  virtual bool wants(std::size_t env, bool realtime) = 0;
  /// Choose for what the env shows, or with `reset` note that it only resets.
  virtual void choose(std::size_t env, bool reset, std::uint8_t* action) = 0;
  /// Why what the env shows or gives cannot be; empty if it can. If the episode is over, nothing need be allowed.
  virtual std::string wrong(std::size_t env, double reward, bool over) const = 0;
  /// The step is done.
  virtual void record(std::size_t env, float reward, std::uint8_t status) = 0;
  /// The episode has ended: what is shown is its last observation.
  virtual void end(std::size_t env, double total, std::uint32_t length, const std::vector<std::pair<std::string, double>>& info) = 0;
  /// The env has broken; with `blind` it shows nothing of use.
  virtual void broke(std::size_t env, const std::string& why, bool blind) = 0;
  /// Whether a fragment is complete; then its meta, its parts, and `next`.
  virtual bool full() const = 0;
  virtual std::size_t ended() const = 0;
  virtual Json meta() = 0;
  virtual std::vector<Part> parts() = 0;
  virtual void next() = 0;
};
inline std::unique_ptr<Gatherer> make_gatherer(const Json& welcome, const Spaces& spaces, std::size_t envs, std::uint8_t* const* rows);

/// Takes bytes and gives bytes. Milliseconds of any clock that never goes back are `now`.
class HostSession {
 public:
  ~HostSession() {
    if (memory_fd_ >= 0) ::close(memory_fd_);
    if (memory_ != nullptr) ::munmap(memory_, memory_bytes_);
  }
  HostSession(const HostSession&) = delete;
  HostSession& operator=(const HostSession&) = delete;
  HostSession(Spaces spaces, std::size_t envs, const Identity& who, std::int64_t now)
      : spaces_(std::move(spaces)), count_(envs), who_(who), realtime_(who.realtime), heard_(now), pinged_(now), can_save_(who.saves) {
    spaces_.check();
    if (envs == 0 || envs > MOST_ENVS) throw Error("a simulator has 1 to 65536 envs, not " + std::to_string(envs));
    if (who.waits) handshake_ms_ = std::numeric_limits<std::int64_t>::max();
    say_hello();
  }

  /// The link is lost, and the session may go on over another one: `again`.
  bool resumable = false;
  bool down() const { return down_ && !over(); }
  bool resuming() const { return session_ != 0 && !welcomed_ && !over(); }
  /// There is another link: ask to go on. Answers that were lost are asked for again.
  void again(std::int64_t now) {
    down_ = welcomed_ = false, heard_ = pinged_ = now;
    in_.clear(), out.clear(), ready_.clear();
    say_hello();
  }

 private:
  void say_hello() {
    const Identity& who = who_;
    Json meta = Json::object({{"protocol", Json::object({{"major", 1}, {"minor_min", 0}, {"minor_max", 0}})},
                              {"software", Json::object({{"name", who.name}, {"version", who.version}})},
                              {"pid", static_cast<double>(::getpid())},
                              {"spaces", spaces_.json()},
                              {"autoreset", std::vector<Json>{"same_step", "explicit"}},
                              {"capabilities", capabilities(who, spaces_.agents.is_null())}});
    if (!spaces_.agents.is_null()) meta.set("agents", spaces_.agents);
    if (who.host >= 0) meta.set("host", who.host);
    if (session_ != 0) {
      char text[17];
      std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(session_));
      meta.set("resume", text);
    }
    if (!who.launch.empty()) {
      meta.set("launch", who.launch);
      meta.set("proof", hex(hmac_sha256(who.token, "raynforce hello " + who.launch)));
    }
    Header header;
    header.type = HELLO, header.envs = static_cast<std::uint32_t>(count_);
    put(header, meta, {});
  }

 public:

  /// To be sent; the caller removes what it has sent.
  std::vector<std::uint8_t> out;
  /// To be done, each answered by `submit` or `broken`; the caller takes them.
  std::vector<Request> requests;

  bool open() const { return welcomed_ && !over(); }
  bool over() const { return !ended_.code.empty(); }
  const Ended& ended() const { return ended_; }
  std::size_t envs() const { return count_; }
  const Spaces& spaces() const { return spaces_; }
  /// The settings of an env, from the trainer.
  Json config(std::size_t env) const {
    Json config = config_;
    const Json& own = env_config_[env];
    for (const std::string& key : own.keys()) config.set(key, own[key]);
    return config;
  }
  Obs obs(std::size_t env) const { return Obs(&spaces_.obs, rows_.data(), env); }
  bool times() const { return (flags_ & TIMING) != 0; }

  /// A file descriptor that came with the bytes that are fed next: the memory that observations are shared in. It is closed here.
  void take_memory(int fd) {
    if (memory_fd_ >= 0) ::close(memory_fd_);
    memory_fd_ = fd;
  }

  void feed(const std::uint8_t* data, std::size_t bytes, std::int64_t now, std::int64_t progress_ms) {
    if (over()) return;
    heard_ = now;
    in_.insert(in_.end(), data, data + bytes);
    std::size_t at = 0;
    try {
      while (!over() && take(at, progress_ms)) {}
    } catch (const Violation& wrong) {
      say_error("session", false, wrong.code, wrong.what(), {});
      end("violation", std::string("the trainer broke the protocol (") + wrong.code + "): " + wrong.what());
    } catch (const Error& wrong) {
      say_error("session", false, "meta", wrong.what(), {});
      end("violation", std::string("the trainer broke the protocol (meta): ") + wrong.what());
    }
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(std::min(at, in_.size())));
  }

  /// An env has done what it was asked; its observation is in place. An episode that has ended is followed by a reset request.
  void submit(std::size_t env, const Step& step, float seconds = 0) {
    Lane& lane = owing(env);
    if (lane.saving) throw Error("env " + std::to_string(env) + " was asked for its state: submit_state answers that");
    seconds_[env] += seconds;
    if (lane.own) return gather(env, step);
    if (lane.resetting) {  // by RESET, or after the end of an episode
      if (lane.after_end)
        lane.after_end = false;
      else
        reward_[env] = 0, status_[env] = FIRST;
      lane.resetting = false;
    } else {
      reward_[env] = static_cast<float>(step.reward);
      status_[env] = static_cast<std::uint8_t>((step.terminated ? TERMINATED : 0) | (step.truncated ? TRUNCATED : 0));
      lane.episode_return += step.reward, ++lane.episode_length;
      if (status_[env] != 0) {
        returns_[env] = lane.episode_return, lengths_[env] = lane.episode_length;
        lane.episode_return = 0, lane.episode_length = 0;
        if (tells_info_) lane.info = step.info;
        if (same_step_) {
          for (std::size_t leaf = 0; leaf < spaces_.obs.size(); ++leaf) {
            const std::size_t bytes = spaces_.obs[leaf].bytes();
            std::memcpy(finals_[leaf] + env * bytes, rows_[leaf] + env * bytes, bytes);
          }
          lane.resetting = lane.after_end = true;
          ask_reset(env);
          return;
        }
        lane.needs_reset = true;
      }
    }
    lane.busy = false;
    ready_.push_back(static_cast<std::uint32_t>(env));
    if (gatherer_ != nullptr) {
      flush();  // before what it shows is written over
      gatherer_->begin(env);
      go_on(env);
    }
  }

  /// The state of an env that was asked for it.
  void submit_state(std::size_t env, const std::string& bytes) {
    Lane& lane = owing(env);
    if (!lane.saving) throw Error("env " + std::to_string(env) + " was not asked for its state");
    if (bytes.size() > MOST_STATE - sizeof(StateHead)) return broken(env, "its state has " + std::to_string(bytes.size()) + " bytes; at most 64 MiB can be saved");
    StateHead head;
    head.length = lane.episode_length, head.stream = lane.stream, head.total = lane.episode_return;
    head.check = checksum(head, bytes.data(), bytes.size());
    lane.state.assign(reinterpret_cast<const char*>(&head), sizeof head).append(bytes);
    lane.saving = lane.busy = false, lane.saved = true;
    saved_.push_back(static_cast<std::uint32_t>(env));
  }

  /// An env has failed: its episode is cut, and the trainer resets it.
  void broken(std::size_t env, const std::string& why) {
    Lane& lane = owing(env);
    if (lane.own) return gather_broken(env, why.empty() ? "it gave no reason" : why);
    lane.busy = lane.resetting = lane.after_end = lane.saving = false;
    lane.needs_reset = true, lane.failure = one_line(why.empty() ? "it gave no reason" : why);
    lane.episode_return = 0, lane.episode_length = 0;
    if (welcomed_) say_broken(env);
  }

  /// Hand over what is ready, in one message.
  void flush() {
    if (!ready_.empty() && open()) say_result(ready_);  // else they are asked for again
    ready_.clear();
    if (!saved_.empty() && open()) say_states(saved_);
    saved_.clear();
  }

  /// Time passes.
  void tick(std::int64_t now) {
    if (over()) return;
    const std::int64_t silent = now - heard_, most = welcomed_ ? silence_ms_ : handshake_ms_;
    if (down_) return;
    if (silent >= most) {
      if (resumable && session_ != 0 && gatherer_ == nullptr) down_ = true;
      else end(gatherer_ == nullptr ? "silent" : "dropped", "the trainer has not answered for " + std::to_string(silent / 1000) + " s");
    } else if (welcomed_ && silent >= ping_ms_ && now - pinged_ >= ping_ms_) {
      pinged_ = now;
      say(PING, Json());
    }
  }

  void log(const std::string& level, const std::string& text) {
    if (open()) say(LOG, Json::object({{"level", level}, {"text", one_line(text)}}));
  }

  void close(const std::string& reason) {
    if (over()) return;
    if (welcomed_) {
      flush();
      say(CLOSE, Json::object({{"reason", one_line(reason)}, {"grace_ms", 0}}));
    }
    end("closed", reason);
  }

  void lost(const std::string& why) {
    if (over()) return;
    if (resumable && session_ != 0 && gatherer_ == nullptr) down_ = true;
    else end(gatherer_ == nullptr ? "lost" : "dropped", why);
  }

 private:
  struct Lane {
    std::uint64_t request = 0;  // the newest that was taken
    std::uint64_t stream = 0;   // where the next episode's seed comes from
    bool seeded = false, busy = false, resetting = false, after_end = false, needs_reset = true;
    bool saving = false, saved = false;  // is asked for its state; has told it last
    bool own = false;  // what it does was asked by the policy on this side
    std::uint8_t status = 0;  // of a step that is not yet recorded
    double episode_return = 0;
    std::uint32_t episode_length = 0;
    std::string state;    // if it was told last
    std::string failure;  // why it broke, until it is reset
    std::vector<std::pair<std::string, double>> info;
  };

  void end(std::string code, std::string text) { ended_ = {std::move(code), std::move(text)}; }

  Lane& owing(std::size_t env) {
    if (env >= lanes_.size() || !lanes_[env].busy) throw Error("env " + std::to_string(env) + " was asked nothing: nothing can be submitted");
    return lanes_[env];
  }

  // -- what comes

  bool take(std::size_t& at, std::int64_t progress_ms) {
    Header header;
    if (in_.size() - at < sizeof header) return false;
    std::memcpy(&header, in_.data() + at, sizeof header);
    if (std::memcmp(header.magic, "RAYN", 4) != 0) throw Violation("magic", "this is another protocol");
    if (header.major != 1 && header.type != REJECT) throw Violation("version", "major version " + std::to_string(header.major) + "; this side speaks 1");
    check(header);
    const std::size_t whole = sizeof header + header.meta_bytes + static_cast<std::size_t>(header.body_bytes);
    if (in_.size() - at < whole) {
      in_.reserve(at + whole);
      return false;
    }
    const std::uint8_t* body = in_.data() + at + sizeof header + header.meta_bytes;
    const std::string_view text(reinterpret_cast<const char*>(in_.data() + at + sizeof header), header.meta_bytes);
    handle(header, text, body, progress_ms);
    at += whole;
    return true;
  }

  /// Its length, before a byte of it is stored.
  void check(const Header& header) {
    const bool greeting = header.type == WELCOME || header.type == REJECT;
    if (header.meta_bytes % 8 != 0) throw Violation("size", "the meta is not a multiple of 8 bytes");
    if (header.meta_bytes > (greeting ? GREETING_META : OTHER_META)) throw Violation("limit", "a meta of " + std::to_string(header.meta_bytes) + " bytes");
    const std::uint64_t envs = header.envs, ids = padded(envs * 4);
    std::uint64_t body = 0;
    unsigned buffers = 0;
    switch (header.type) {
      case WELCOME: body = envs * 8, buffers = 1; break;
      case RESET: body = ids + ((header.flags & SEEDS) != 0 ? envs * 8 : 0), buffers = (header.flags & SEEDS) != 0 ? 2 : 1; break;
      case STEP: body = ids + padded(envs * spaces_.action.bytes()), buffers = 2; break;
      case ERROR: body = ids + envs * 8, buffers = 2; break;
      case SNAPSHOT: body = ids, buffers = 1; break;
      case RESTORE:  // its states are as long as it says, within limits
        body = ids + envs * 8, buffers = 3;
        if (header.body_bytes > MOST_BODY || (header.body_bytes > body && header.body_bytes - body > envs * MOST_STATE)) throw Violation("limit", "states of " + std::to_string(header.body_bytes) + " bytes");
        if (header.body_bytes > body && header.body_bytes % 8 == 0) body = header.body_bytes;
        break;
      case POLICY:
        if (gatherer_ == nullptr) throw Violation("state", "POLICY, and inference was not agreed upon");
        body = gatherer_->policy_bytes(), buffers = static_cast<unsigned>(gatherer_->policy_buffers());
        break;
      case REJECT: case PING: case PONG: case CLOSE: case SAMPLE: break;
      default:
        if (header.body_bytes > UNKNOWN_BODY) throw Violation("limit", "an unknown message of " + std::to_string(header.body_bytes) + " bytes");
        return;
    }
    if (envs > count_) throw Violation("env", std::to_string(envs) + " envs; there are " + std::to_string(count_));
    if (header.type == ERROR && header.body_bytes == 0 && header.envs == 0) return;  // with or without its empty buffers
    if (header.body_bytes != body || header.buffers != buffers) throw Violation("size", "type " + std::to_string(header.type) + " has a wrong length");
    const unsigned flags = header.type == RESET ? SEEDS : 0;
    if ((header.flags & ~flags) != 0) throw Violation("flags", "unknown flags");
    if (header.ended != 0 || header.reserved != 0) throw Violation("field", "a reserved field is not 0");
    if ((header.type == SNAPSHOT || header.type == RESTORE) && welcomed_ && !saves_) throw Violation("state", "a capability that was not agreed upon: snapshot");
  }

  void handle(const Header& header, std::string_view text, const std::uint8_t* body, std::int64_t progress_ms) {
    if (!welcomed_) return greet(header, text, body);
    if (header.session != session_) return;  // of another session
    switch (header.type) {
      case RESET: case STEP: case SNAPSHOT: case RESTORE: return ask(header, body);
      case POLICY: case SAMPLE: {
        if (gatherer_ == nullptr) throw Violation("state", "SAMPLE, and inference was not agreed upon");
        if (header.sequence <= sampled_) return;  // it has come before
        sampled_ = header.sequence;
        const Json meta = text.empty() ? Json() : Json::parse(text);
        header.type == POLICY ? gatherer_->set(meta, body) : gatherer_->ask(meta, header.sequence);
        for (std::size_t env = 0; env < count_; ++env) go_on(env);
        return;
      }
      case PING: return say(PONG, Json::object({{"progress_ms", static_cast<double>(progress_ms)}}), header.sequence);
      case PONG: return;
      case CLOSE: return close("the trainer is done");
      case ERROR: {
        const Json meta = text.empty() ? Json() : Json::parse(text);
        if (!meta["recoverable"].boolean(true)) end("violation", "the trainer says (" + one_line(meta["code"].text(), 40) + "): " + one_line(meta["text"].text()));
        return;
      }
      case WELCOME: case REJECT: case HELLO: case RESULT: case LOG: case FRAGMENT: throw Violation("type", "type " + std::to_string(header.type) + " is not for a simulator");
      default: return say_error("session", true, "type", "type " + std::to_string(header.type) + " is unknown", {});
    }
  }

  void greet(const Header& header, std::string_view text, const std::uint8_t* body) {
    if (header.type != WELCOME && header.type != REJECT) throw Violation("state", "type " + std::to_string(header.type) + " came before WELCOME");
    const Json meta = Json::parse(text);
    if (header.type == REJECT) {
      std::string why = one_line(meta["text"].text("it gives no reason"));
      for (const Json& item : meta["diff"].items())
        why += "; " + one_line(item["field"].text(), 200) + " is " + one_line(item["host"].dump(), 200) + " here and " + one_line(item["policy"].dump(), 200) + " there";
      if (meta["code"].text() == "over") return end("over", "the trainer is done");
      return end("refused", "the trainer refuses this simulator (" + one_line(meta["code"].text(), 40) + "): " + why);
    }
    if (header.session == 0) throw Violation("session", "session 0 in WELCOME");
    if (header.session == session_ && !lanes_.empty()) {  // it goes on
      welcomed_ = true;
      return;
    }
    if (session_ != 0) {
      session_ = header.session;
      say(CLOSE, Json::object({{"reason", "the simulator begins another session"}, {"grace_ms", 0}}));
      return end("replaced", "the trainer has given the session up");
    }
    if (header.envs != count_) throw Violation("env", "WELCOME for " + std::to_string(header.envs) + " envs");
    const std::string autoreset = meta["autoreset"].text();
    if (autoreset != "same_step" && autoreset != "explicit") throw Violation("field", "autoreset was not offered");
    const std::string& hash = meta["spec_hash"].text();
    if (!hash.empty() && hash != hex(sha256(spaces_.canonical()))) throw Violation("field", "spec_hash: the spaces were not understood");
    session_ = header.session, minor_ = header.minor;
    bool gathers = false;
    same_step_ = autoreset == "same_step";
    for (const Json& capability : meta["capabilities"].items()) {
      if (capability.text() == "episodes") flags_ |= EPISODES;
      if (capability.text() == "timing") flags_ |= TIMING;
      if (capability.text() == "info") tells_info_ = true;
      if (capability.text() == "memory") shares_ = true;
      if (capability.text() == "snapshot") saves_ = can_save_;
      if (capability.text() == "inference") gathers = true;
    }
    const Json& deadlines = meta["deadlines"];
    ping_ms_ = milliseconds(deadlines["ping_ms"], 1000), silence_ms_ = milliseconds(deadlines["silence_ms"], 10000);
    config_ = meta["config"].type() == Json::Type::object ? meta["config"] : Json::object();
    env_config_ = meta["env_config"].items();
    if (!env_config_.empty() && env_config_.size() != count_) throw Violation("field", "env_config is not one for each env");
    env_config_.resize(count_, Json::object());
    lanes_.resize(count_);
    for (std::size_t env = 0; env < count_; ++env) std::memcpy(&lanes_[env].stream, body + 8 * env, 8);
    reward_.resize(count_), status_.resize(count_), seconds_.resize(count_), returns_.resize(count_), lengths_.resize(count_);
    lay_out();
    actions_.resize(count_ * spaces_.action.bytes());
    if (gathers) {
      if (!same_step_) throw Violation("field", "inference needs same_step");
      try {
        gatherer_ = make_gatherer(meta, spaces_, count_, rows_.data());
      } catch (const Violation&) {
        throw;
      } catch (const Error& wrong) {
        throw Violation("policy", wrong.what());
      }
    }
    welcomed_ = true;
  }

  static std::vector<Json> capabilities(const Identity& who, bool alone) {
    std::vector<Json> names{"episodes", "timing", "info"};
    if (alone) names.emplace_back("inference");  // of several agents, the trainer chooses
    if (who.shares_memory) names.emplace_back("memory");
    if (who.saves) names.emplace_back("snapshot");
    return names;
  }

  /// Where observations lie: one array for each leaf, then one for each leaf's last of an episode; each begins at a multiple of 64 bytes.
  void lay_out() {
    std::vector<std::size_t> offsets;
    std::size_t bytes = 0;
    for (int part = 0; part < (same_step_ ? 2 : 1); ++part)
      for (const Leaf& leaf : spaces_.obs) offsets.push_back(bytes), bytes += (count_ * leaf.bytes() + 63) & ~std::size_t{63};
    std::uint8_t* begin = nullptr;
    if (shares_) {
      struct stat found {};
      if (memory_fd_ < 0 || ::fstat(memory_fd_, &found) != 0 || static_cast<std::size_t>(found.st_size) < bytes)
        throw Violation("field", "shared memory was agreed upon, and did not come or is too small");
      void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd_, 0);
      if (mapped == MAP_FAILED) throw Violation("field", why("the shared memory cannot be mapped"));
      memory_ = mapped, memory_bytes_ = bytes, begin = static_cast<std::uint8_t*>(mapped);
    } else {
      storage_.resize(bytes);
      begin = storage_.data();
    }
    for (std::size_t i = 0; i < offsets.size(); ++i) (i < spaces_.obs.size() ? rows_ : finals_).push_back(begin + offsets[i]);
  }

  static std::int64_t milliseconds(const Json& json, std::int64_t otherwise) {
    const double found = json.number(static_cast<double>(otherwise));
    if (!(found >= 1 && found <= 86400000)) throw Violation("field", "a deadline that cannot be");
    return static_cast<std::int64_t>(found);
  }

  /// A request: what is new is done, what comes again is answered again, what is old is ignored.
  void ask(const Header& header, const std::uint8_t* body) {
    if (header.envs == 0) throw Violation("env", "a request for no env");
    if (gatherer_ != nullptr && (header.type == STEP || sampled_ != 0)) throw Violation("state", "with inference, envs are reset once and never stepped by the trainer");
    const std::size_t action_bytes = spaces_.action.bytes();
    const std::uint8_t* more = body + padded(std::size_t{header.envs} * 4);
    std::vector<std::uint32_t> again, told;
    std::uint64_t at = 0;  // of a state in RESTORE
    if (header.type == RESTORE) check_sizes(header, more);
    asked_.assign(count_, false);
    for (std::size_t row = 0; row < header.envs; ++row) {
      std::uint32_t env;
      std::memcpy(&env, body + 4 * row, 4);
      if (env >= count_ || asked_[env]) throw Violation("env", "env " + std::to_string(env) + " does not exist, or comes twice");
      asked_[env] = true;
      Lane& lane = lanes_[env];
      std::uint64_t size = 0, begin = at;
      if (header.type == RESTORE) std::memcpy(&size, more + 8 * row, 8), at += size;
      if (header.sequence <= lane.request) {
        if (header.sequence == lane.request && !lane.busy) {
          if (!lane.failure.empty()) say_broken(env);
          else (lane.saved ? told : again).push_back(env);
        }
        continue;
      }
      if (lane.busy) throw Violation("env", "env " + std::to_string(env) + " was asked before it had answered");
      if ((header.type == STEP || header.type == SNAPSHOT) && lane.needs_reset)
        throw Violation("env", "env " + std::to_string(env) + " must be reset before it is stepped or saved");
      lane.request = header.sequence, lane.busy = true, lane.saved = false;
      lane.state = std::string();
      if (header.type == SNAPSHOT) {
        lane.saving = true;
        requests.push_back({Request::Kind::save, env, 0, action(env)});
        continue;
      }
      seconds_[env] = 0, lane.info.clear();
      if (header.type == RESTORE) {
        ask_load(env, reinterpret_cast<const char*>(more) + 8 * header.envs + begin, static_cast<std::size_t>(size));
        continue;
      }
      if (header.type == RESET) {
        lane.needs_reset = false, lane.resetting = true, lane.after_end = false, lane.failure.clear();
        lane.episode_return = 0, lane.episode_length = 0;
        if ((header.flags & SEEDS) != 0) std::memcpy(&lane.stream, more + 8 * row, 8), lane.seeded = false;
        ask_reset(env);
      } else {
        std::memcpy(actions_.data() + env * action_bytes, more + row * action_bytes, action_bytes);
        check_action(env);
        requests.push_back({Request::Kind::step, env, 0, action(env)});
      }
    }
    if (!again.empty() || !told.empty()) flush();
    if (!again.empty()) say_result(again);
    if (!told.empty()) say_states(told);
  }

  /// That the states of a RESTORE are as long as they are said to be.
  static void check_sizes(const Header& header, const std::uint8_t* sizes) {
    std::uint64_t total = 0;
    for (std::size_t row = 0; row < header.envs; ++row) {
      std::uint64_t size;
      std::memcpy(&size, sizes + 8 * row, 8);
      if (size > MOST_STATE) throw Violation("limit", "a state of " + std::to_string(size) + " bytes");
      total += size;
    }
    const std::uint64_t there = header.body_bytes - padded(std::size_t{header.envs} * 4) - 8 * std::uint64_t{header.envs};
    if (padded(static_cast<std::size_t>(total)) != there) throw Violation("size", "states of " + std::to_string(there) + " bytes; their sizes make them " + std::to_string(total));
  }

  /// The env goes on where it was saved.
  void ask_load(std::uint32_t env, const char* bytes, std::size_t count) {
    Lane& lane = lanes_[env];
    StateHead head;
    const StateHead sample;
    if (count >= sizeof head) std::memcpy(&head, bytes, sizeof head);
    if (count < sizeof head || std::memcmp(head.tag, sample.tag, 4) != 0 || head.check != checksum(head, bytes + sizeof head, count - sizeof head))
      return broken(env, "a state that was not saved by such a simulator, or is damaged");
    lane.needs_reset = false, lane.resetting = true, lane.after_end = false, lane.failure.clear();
    lane.stream = head.stream, lane.seeded = true, lane.episode_return = head.total, lane.episode_length = head.length;
    requests.push_back({Request::Kind::load, env, lane.stream, action(env), std::string(bytes + sizeof head, count - sizeof head)});
  }

  Action action(std::size_t env) const { return Action(&spaces_.action, actions_.data() + env * spaces_.action.bytes()); }

  void check_action(std::uint32_t env) const {
    const Leaf& leaf = spaces_.action;
    if (leaf.dtype != DType::i64) return;
    for (std::size_t i = 0; i < leaf.sizes.size(); ++i) {
      const std::int64_t choice = action(env).choice(i) - (i < leaf.start.size() ? leaf.start[i] : 0);
      if (choice < 0 || choice >= leaf.sizes[i]) throw Violation("action", "the action of env " + std::to_string(env) + " is not in its space");
    }
  }

  // -- the policy on this side

  /// Have an idle env take its next step, if fragments are asked for.
  void go_on(std::size_t env) {
    Lane& lane = lanes_[env];
    if (lane.busy || lane.request == 0 || (lane.needs_reset && !lane.own) || !gatherer_->wants(env, realtime_)) return;
    const bool reset = lane.needs_reset;
    gatherer_->choose(env, reset, actions_.data() + env * spaces_.action.bytes());
    lane.busy = lane.own = true, lane.needs_reset = false, lane.status = reset ? BROKE : 0;
    if (reset) {
      lane.resetting = true;
      ask_reset(env);
    } else {
      requests.push_back({Request::Kind::step, static_cast<std::uint32_t>(env), 0, action(env)});
    }
  }

  void gather(std::size_t env, const Step& step) {
    Lane& lane = lanes_[env];
    if (const std::string wrong = gatherer_->wrong(env, lane.resetting ? 0 : step.reward, !lane.resetting && step.terminated); !wrong.empty()) return gather_broken(env, wrong);
    if (!lane.resetting) {
      reward_[env] = static_cast<float>(step.reward);
      lane.status = static_cast<std::uint8_t>((step.terminated ? TERMINATED : 0) | (step.truncated ? TRUNCATED : 0) | (lane.episode_length == 0 ? FIRST : 0));
      lane.episode_return += step.reward, ++lane.episode_length;
      if ((lane.status & (TERMINATED | TRUNCATED)) != 0) {
        gatherer_->end(env, lane.episode_return, lane.episode_length, step.info);
        lane.episode_return = 0, lane.episode_length = 0, lane.resetting = true;
        return ask_reset(env);
      }
    }
    gathered(env);
  }

  void gather_broken(std::size_t env, const std::string& why) {
    Lane& lane = lanes_[env];
    const bool blind = lane.resetting;
    gatherer_->broke(env, one_line(why, 500), blind);
    lane.episode_return = 0, lane.episode_length = 0;
    if (blind) {  // each further attempt is a row of its own
      lane.needs_reset = true;
      return gathered(env);
    }
    lane.status = BROKE, lane.resetting = true;
    ask_reset(env);
  }

  void gathered(std::size_t env) {
    Lane& lane = lanes_[env];
    gatherer_->record(env, lane.status == BROKE ? 0 : reward_[env], lane.status);
    lane.busy = lane.resetting = false;
    if (!gatherer_->full()) return go_on(env);
    Header header;
    header.type = FRAGMENT, header.sequence = ++sequence_, header.envs = static_cast<std::uint32_t>(count_);
    header.ended = static_cast<std::uint32_t>(gatherer_->ended());
    const Json meta = gatherer_->meta();
    put(header, meta, gatherer_->parts());
    gatherer_->next();
    for (std::size_t other = 0; other < count_; ++other) go_on(other);
  }

  /// The first episode of a stream has its seed; each further one a seed of its own.
  void ask_reset(std::size_t env) {
    Lane& lane = lanes_[env];
    if (lane.seeded) lane.stream = mixed(lane.stream);
    lane.seeded = true;
    requests.push_back({Request::Kind::reset, static_cast<std::uint32_t>(env), lane.stream, action(env)});
  }

  // -- what goes

  using Part = Gatherer::Part;

  std::uint8_t* grow(std::size_t bytes) {
    const std::size_t at = out.size();
    out.resize(at + bytes);
    return out.data() + at;
  }

  void put(Header header, const Json& meta, const std::vector<Part>& parts) {
    std::string text = meta.is_null() ? "" : meta.dump();
    text.resize(padded(text.size()), ' ');
    header.minor = minor_, header.session = header.type == HELLO ? 0 : session_;
    header.meta_bytes = static_cast<std::uint32_t>(text.size()), header.buffers = static_cast<std::uint16_t>(parts.size());
    for (const Part& part : parts) header.body_bytes += padded(part.bytes);
    std::uint8_t* to = grow(sizeof header + text.size() + static_cast<std::size_t>(header.body_bytes));
    std::memcpy(to, &header, sizeof header);
    if (!text.empty()) std::memcpy(to + sizeof header, text.data(), text.size());
    to += sizeof header + text.size();
    for (const Part& part : parts) {
      if (part.bytes != 0) std::memcpy(to, part.data, part.bytes);
      to += padded(part.bytes);
    }
  }

  void say(std::uint8_t type, const Json& meta, std::uint64_t sequence = 0) {
    Header header;
    header.type = type, header.sequence = type == PONG ? sequence : ++sequence_;
    put(header, meta, {});
  }

  void say_error(const char* scope, bool recoverable, const std::string& code, const std::string& text, const std::vector<std::uint32_t>& envs) {
    Header header;
    header.type = ERROR, header.sequence = ++sequence_, header.envs = static_cast<std::uint32_t>(envs.size());
    std::vector<std::uint64_t> asked;
    for (const std::uint32_t env : envs) asked.push_back(lanes_[env].request);
    const Json meta = Json::object({{"scope", scope}, {"recoverable", recoverable}, {"code", code}, {"text", one_line(text)}});
    put(header, meta, {{envs.data(), 4 * envs.size()}, {asked.data(), 8 * asked.size()}});
  }

  void say_broken(std::size_t env) { say_error("env", true, "raised", lanes_[env].failure, {static_cast<std::uint32_t>(env)}); }

  /// In messages of no more than one state's most bytes, or of one state.
  void say_states(const std::vector<std::uint32_t>& envs) {
    for (std::size_t row = 0, end = 0; row < envs.size(); row = end) {
      std::vector<std::uint64_t> asked, sizes;
      std::string states;
      for (end = row; end < envs.size() && (end == row || states.size() + lanes_[envs[end]].state.size() <= MOST_STATE); ++end) {
        const Lane& lane = lanes_[envs[end]];
        asked.push_back(lane.request), sizes.push_back(lane.state.size()), states += lane.state;
      }
      Header header;
      header.type = SNAPSHOT, header.sequence = ++sequence_, header.envs = static_cast<std::uint32_t>(asked.size());
      put(header, Json(), {{envs.data() + row, 4 * asked.size()}, {asked.data(), 8 * asked.size()}, {sizes.data(), 8 * sizes.size()}, {states.data(), states.size()}});
    }
  }

  Json info(const std::vector<std::uint32_t>& envs) const {
    Json all = Json::object();
    std::size_t room = OTHER_META - 64;
    for (const std::uint32_t env : envs) {
      if (lanes_[env].info.empty() || (status_[env] & (TERMINATED | TRUNCATED)) == 0) continue;
      Json own = Json::object();
      for (const auto& [name, value] : lanes_[env].info) own.set(name, value);
      const std::size_t bytes = own.dump().size() + 16;
      if (bytes > room) break;
      room -= bytes;
      all.set(std::to_string(env), std::move(own));
    }
    return all.keys().empty() ? Json() : Json::object({{"info", std::move(all)}});
  }

  /// Copies the rows of these envs; all of them in their order is one copy.
  static std::uint8_t* gather(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes, const std::vector<std::uint32_t>& envs, bool all) {
    if (all) {
      std::memcpy(to, from, envs.size() * bytes);
    } else {
      for (std::size_t row = 0; row < envs.size(); ++row) std::memcpy(to + row * bytes, from + envs[row] * bytes, bytes);
    }
    return to + padded(envs.size() * bytes);
  }

  void say_result(const std::vector<std::uint32_t>& envs) {
    ends_.clear();
    bool all = envs.size() == count_;
    for (std::size_t row = 0; row < envs.size(); ++row) {
      all = all && envs[row] == row;
      if ((status_[envs[row]] & (TERMINATED | TRUNCATED)) != 0) ends_.push_back(envs[row]);
    }
    const std::size_t rows = envs.size(), ends = ends_.size();
    Header header;
    header.type = RESULT, header.flags = flags_, header.minor = minor_, header.session = session_, header.sequence = ++sequence_;
    header.envs = static_cast<std::uint32_t>(rows), header.ended = static_cast<std::uint32_t>(ends);
    std::size_t body = padded(4 * rows) + 8 * rows + padded(4 * rows) + padded(rows), buffers = 4;
    if ((flags_ & TIMING) != 0) body += padded(4 * rows), ++buffers;
    if (!shares_)
      for (const Leaf& leaf : spaces_.obs) body += padded(rows * leaf.bytes()), ++buffers;
    if ((flags_ & EPISODES) != 0) body += 8 * ends + padded(4 * ends), buffers += 2;
    if (same_step_ && !shares_)
      for (const Leaf& leaf : spaces_.obs) body += padded(ends * leaf.bytes()), ++buffers;
    std::string text;
    if (tells_info_ && ends != 0) {
      const Json meta = info(ends_);
      if (!meta.is_null()) text = meta.dump();
      text.resize(padded(text.size()), ' ');
    }
    header.buffers = static_cast<std::uint16_t>(buffers), header.meta_bytes = static_cast<std::uint32_t>(text.size()), header.body_bytes = body;
    std::uint8_t* to = grow(sizeof header + text.size() + body);
    std::memcpy(to, &header, sizeof header);
    if (!text.empty()) std::memcpy(to + sizeof header, text.data(), text.size());
    to += sizeof header + text.size();
    std::memcpy(to, envs.data(), 4 * rows);
    to += padded(4 * rows);
    for (std::size_t row = 0; row < rows; ++row) std::memcpy(to + 8 * row, &lanes_[envs[row]].request, 8);
    to += 8 * rows;
    to = gather(to, reinterpret_cast<const std::uint8_t*>(reward_.data()), 4, envs, all);
    to = gather(to, status_.data(), 1, envs, all);
    if ((flags_ & TIMING) != 0) to = gather(to, reinterpret_cast<const std::uint8_t*>(seconds_.data()), 4, envs, all);
    for (std::size_t leaf = 0; leaf < rows_.size() && !shares_; ++leaf) to = gather(to, rows_[leaf], spaces_.obs[leaf].bytes(), envs, all);
    if ((flags_ & EPISODES) != 0) {
      to = gather(to, reinterpret_cast<const std::uint8_t*>(returns_.data()), 8, ends_, false);
      to = gather(to, reinterpret_cast<const std::uint8_t*>(lengths_.data()), 4, ends_, false);
    }
    for (std::size_t leaf = 0; leaf < finals_.size() && !shares_; ++leaf) to = gather(to, finals_[leaf], spaces_.obs[leaf].bytes(), ends_, false);
  }

  Spaces spaces_;
  std::size_t count_;
  Identity who_;
  std::unique_ptr<Gatherer> gatherer_;
  bool realtime_ = false;
  std::uint64_t sampled_ = 0;  // the newest POLICY or SAMPLE
  std::int64_t heard_, pinged_, ping_ms_ = 1000, silence_ms_ = 10000, handshake_ms_ = 30000;
  bool welcomed_ = false, down_ = false, same_step_ = false, tells_info_ = false, can_save_, saves_ = false;
  std::uint8_t flags_ = 0, minor_ = 0;
  std::uint64_t session_ = 0, sequence_ = 0;
  Ended ended_;
  Json config_;
  std::vector<Json> env_config_;
  std::vector<Lane> lanes_;
  std::vector<std::uint8_t> in_;
  std::vector<bool> asked_;
  std::vector<std::uint32_t> ready_, ends_, saved_;
  // The last answer of each env, which is sent again if it is asked for again.
  std::vector<std::uint8_t*> rows_, finals_;
  std::vector<std::uint8_t> storage_;
  int memory_fd_ = -1;
  void* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  bool shares_ = false;
  std::vector<std::uint8_t> status_, actions_;
  std::vector<float> reward_, seconds_;
  std::vector<double> returns_;
  std::vector<std::uint32_t> lengths_;
};

// -- sockets ------------------------------------------------------------------------------------------------------------

inline std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// A socket that is closed with it.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

/// Whether an address of the form host:port can be reached from this machine alone.
inline bool is_local(const std::string& place) {
  const std::string host = place.substr(0, place.rfind(':'));
  return host == "localhost" || host == "::1" || host == "[::1]" || host.rfind("127.", 0) == 0;
}

/// `unix:/path`, `unix:@name` (abstract), `tcp:host:port`.
class Address {
 public:
  explicit Address(const std::string& text) : text_(text) {
    if (text.rfind("unix:", 0) == 0 && text.size() > 5) {
      const std::string path = text.substr(5);
      if (path.size() >= sizeof local_.sun_path) throw Error("address " + text + " is too long for a Unix socket");
      local_.sun_family = AF_UNIX;
      std::memcpy(local_.sun_path, path.data(), path.size());
      length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
      if (path[0] == '@') local_.sun_path[0] = '\0';
      else ++length_;
    } else if (text.rfind("tcp:", 0) == 0 && text.rfind(':') > 4) {
      const std::size_t colon = text.rfind(':');
      if (!is_local(text.substr(4))) throw Error("address " + text + " reaches beyond this machine and is not encrypted: use zmq:tcp://" + text.substr(4) + " with keys, or a tunnel");
      host_ = text.substr(4, colon - 4), port_ = text.substr(colon + 1);
      if (host_.size() > 2 && host_.front() == '[' && host_.back() == ']') host_ = host_.substr(1, host_.size() - 2);
    } else {
      throw Error("address " + text + " is not one of: unix:/path, unix:@name, tcp:host:port, zmq:tcp://host:port, zmq:ipc:///path");
    }
  }

  Socket connect() const {
    return open([](int fd, const sockaddr* where, socklen_t length) { return ::connect(fd, where, length); }, "cannot connect to ", false);
  }
  Socket listen() const {
    return open(
        [](int fd, const sockaddr* where, socklen_t length) {
          const int on = 1;
          ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
          return ::bind(fd, where, length) == 0 ? ::listen(fd, 8) : -1;
        },
        "cannot listen on ", true);
  }

 private:
  template <class F>
  Socket open(F use, const char* what, bool passive) const {
    if (port_.empty()) {
      Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (socket.fd() < 0 || use(socket.fd(), reinterpret_cast<const sockaddr*>(&local_), length_) != 0) throw Error(why(what + text_));
      return socket;
    }
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = passive ? AI_PASSIVE : 0;
    if (const int code = ::getaddrinfo(host_.c_str(), port_.c_str(), &hints, &found); code != 0)
      throw Error(what + text_ + ": " + ::gai_strerror(code));
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, ::freeaddrinfo);
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
      Socket socket(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol));
      if (socket.fd() >= 0 && use(socket.fd(), one->ai_addr, one->ai_addrlen) == 0) return socket;
    }
    throw Error(why(what + text_));
  }

  std::string text_, host_, port_;
  sockaddr_un local_{};
  socklen_t length_ = 0;
};

/// What carries messages. `receive` and `send` never wait: -1 with `errno` EAGAIN if there is nothing, or no room; 0 if the other side hung up.
class Wire {
 public:
  Wire() = default;
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  virtual ~Wire() = default;
  virtual int fd() const = 0;
  virtual bool ready() { return false; }  // there is something that `fd` does not show
  virtual bool shares_memory() const { return false; }
  virtual ssize_t receive(std::uint8_t* to, std::size_t bytes, int* passed) = 0;
  virtual ssize_t send(const std::uint8_t* from, std::size_t bytes) = 0;
};

class SocketWire : public Wire {
 public:
  explicit SocketWire(Socket socket) : socket_(std::move(socket)) {
    const int fd = socket_.fd(), on = 1, size = 1 << 20;
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // fails on Unix sockets, which need none
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  }
  int fd() const override { return socket_.fd(); }
  bool shares_memory() const override {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    return ::getsockname(fd(), reinterpret_cast<sockaddr*>(&address), &length) == 0 && address.ss_family == AF_UNIX;
  }
  /// Bytes, and a file descriptor that may come with them where it is asked for.
  ssize_t receive(std::uint8_t* to, std::size_t bytes, int* passed) override {
    if (passed == nullptr) return ::recv(fd(), to, bytes, 0);
    iovec part{to, bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part, message.msg_iovlen = 1, message.msg_control = control, message.msg_controllen = sizeof control;
    const auto found = ::recvmsg(fd(), &message, MSG_CMSG_CLOEXEC);
    for (cmsghdr* one = found > 0 ? CMSG_FIRSTHDR(&message) : nullptr; one != nullptr; one = CMSG_NXTHDR(&message, one))
      if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SCM_RIGHTS) std::memcpy(passed, CMSG_DATA(one), sizeof *passed);
    return found;
  }
  ssize_t send(const std::uint8_t* from, std::size_t bytes) override { return ::send(fd(), from, bytes, MSG_NOSIGNAL); }

 private:
  Socket socket_;
};

// -- ZMQ, loaded when it is first used ----------------------------------------------------------------------------------

/// The functions of libzmq that are used here; its numbers are part of its ABI.
class Zmq {
 public:
  static const Zmq& get() {
    static const Zmq zmq;
    return zmq;
  }
  struct alignas(8) Message {
    unsigned char bytes[64];
  };
  enum { DEALER = 5, FD = 14, EVENTS = 15, LINGER = 17, MAXMSGSIZE = 22, SNDHWM = 23, RCVHWM = 24, IPV6 = 42, CURVE_PUBLICKEY = 48, CURVE_SECRETKEY = 49, CURVE_SERVERKEY = 50 };
  enum { DONTWAIT = 1, POLLIN_ = 1 };
  void* context = nullptr;
  void* (*socket)(void*, int) = nullptr;
  int (*close)(void*) = nullptr;
  int (*setsockopt)(void*, int, const void*, std::size_t) = nullptr;
  int (*getsockopt)(void*, int, void*, std::size_t*) = nullptr;
  int (*connect)(void*, const char*) = nullptr;
  int (*bind)(void*, const char*) = nullptr;
  int (*send)(void*, const void*, std::size_t, int) = nullptr;
  int (*msg_init)(Message*) = nullptr;
  int (*msg_recv)(Message*, void*, int) = nullptr;
  void* (*msg_data)(Message*) = nullptr;
  std::size_t (*msg_size)(const Message*) = nullptr;
  int (*msg_close)(Message*) = nullptr;
  int (*curve_keypair)(char*, char*) = nullptr;
  int (*error)() = nullptr;
  const char* (*strerror)(int) = nullptr;

 private:
  Zmq() {
    void* library = ::dlopen("libzmq.so.5", RTLD_NOW);
    if (library == nullptr) throw Error("ZMQ is not installed here: install libzmq5 (Debian: libzmq3-dev), or use a unix: or tcp: address");
    void* (*make)() = nullptr;
    load(library, "zmq_ctx_new", make);
    load(library, "zmq_socket", socket), load(library, "zmq_close", close);
    load(library, "zmq_setsockopt", setsockopt), load(library, "zmq_getsockopt", getsockopt);
    load(library, "zmq_connect", connect), load(library, "zmq_bind", bind), load(library, "zmq_send", send);
    load(library, "zmq_msg_init", msg_init), load(library, "zmq_msg_recv", msg_recv), load(library, "zmq_msg_data", msg_data);
    load(library, "zmq_msg_size", msg_size), load(library, "zmq_msg_close", msg_close);
    load(library, "zmq_curve_keypair", curve_keypair), load(library, "zmq_errno", error), load(library, "zmq_strerror", strerror);
    context = make();
  }
  template <class F>
  static void load(void* library, const char* name, F& function) {
    void* found = ::dlsym(library, name);
    if (found == nullptr) throw Error(std::string("libzmq has no ") + name);
    std::memcpy(&function, &found, sizeof found);
  }
};

/// A DEALER: one frame is one message.
class ZmqWire : public Wire {
 public:
  /// `server_key` is the trainer's public key; without one nothing is encrypted.
  ZmqWire(const std::string& where, bool listens, const std::string& server_key) : zmq_(Zmq::get()), socket_(zmq_.socket(zmq_.context, Zmq::DEALER)) {
    if (socket_ == nullptr) throw Error("ZMQ: " + why());
    const int none = 0, linger = 500, on = 1;
    for (const int option : {Zmq::SNDHWM, Zmq::RCVHWM}) set(option, &none, sizeof none);  // the protocol bounds what is on its way
    set(Zmq::LINGER, &linger, sizeof linger), set(Zmq::IPV6, &on, sizeof on);
    if (!server_key.empty()) {
      char publicly[41], secretly[41];
      if (zmq_.curve_keypair(publicly, secretly) != 0) fail("this libzmq has no CURVE");
      set(Zmq::CURVE_PUBLICKEY, publicly, 41), set(Zmq::CURVE_SECRETKEY, secretly, 41);
      if (server_key.size() != 40 || zmq_.setsockopt(socket_, Zmq::CURVE_SERVERKEY, server_key.c_str(), 41) != 0) fail("the trainer's key is not one of CURVE");
    }
    if ((listens ? zmq_.bind : zmq_.connect)(socket_, where.c_str()) != 0) fail("cannot " + std::string(listens ? "listen on " : "connect to ") + where + ": " + why());
    std::size_t length = sizeof fd_;
    zmq_.getsockopt(socket_, Zmq::FD, &fd_, &length);
  }
  ~ZmqWire() override { zmq_.close(socket_); }
  int fd() const override { return fd_; }
  bool ready() override {
    if (at_ < held_.size()) return true;
    int events = 0;
    std::size_t length = sizeof events;
    return zmq_.getsockopt(socket_, Zmq::EVENTS, &events, &length) == 0 && (events & Zmq::POLLIN_) != 0;
  }
  ssize_t receive(std::uint8_t* to, std::size_t bytes, int*) override {
    if (at_ == held_.size()) {
      Zmq::Message message;
      zmq_.msg_init(&message);
      if (zmq_.msg_recv(&message, socket_, Zmq::DONTWAIT) < 0) {
        errno = EAGAIN;
        return -1;
      }
      const auto* data = static_cast<const std::uint8_t*>(zmq_.msg_data(&message));
      held_.assign(data, data + zmq_.msg_size(&message)), at_ = 0;
      zmq_.msg_close(&message);
      if (held_.empty()) return receive(to, bytes, nullptr);
    }
    const std::size_t some = std::min(bytes, held_.size() - at_);
    std::memcpy(to, held_.data() + at_, some);
    at_ += some;
    return static_cast<ssize_t>(some);
  }
  /// The first message of these bytes, whole.
  ssize_t send(const std::uint8_t* from, std::size_t) override {
    Header header;
    std::memcpy(&header, from, sizeof header);
    const std::size_t whole = sizeof header + header.meta_bytes + static_cast<std::size_t>(header.body_bytes);
    if (zmq_.send(socket_, from, whole, Zmq::DONTWAIT) < 0) {
      errno = EAGAIN;  // it has not connected yet
      return -1;
    }
    return static_cast<ssize_t>(whole);
  }

 private:
  std::string why() const { return zmq_.strerror(zmq_.error()); }
  [[noreturn]] void fail(const std::string& text) {
    zmq_.close(socket_);
    throw Error("ZMQ: " + text);
  }
  void set(int option, const void* value, std::size_t bytes) {
    if (zmq_.setsockopt(socket_, option, value, bytes) != 0) fail(why());
  }

  const Zmq& zmq_;
  void* socket_;
  int fd_ = -1;
  std::vector<std::uint8_t> held_;
  std::size_t at_ = 0;
};

}  // namespace detail

// -- a trained policy ---------------------------------------------------------------------------------------------------

namespace detail {

inline std::string read_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) throw Error(why("cannot read " + path));
  std::string data;
  char chunk[1 << 16];
  for (std::size_t bytes; (bytes = std::fread(chunk, 1, sizeof chunk, file)) > 0;) data.append(chunk, bytes);
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed) throw Error("cannot read " + path);
  return data;
}

using Shape = std::vector<std::size_t>;

inline std::size_t product(const Shape& shape) {
  std::size_t found = 1;
  for (const std::size_t size : shape) found *= size;
  return found;
}

inline std::size_t whole(const Json& json, const char* what) {
  const double found = json.number(-1);
  if (!(found >= 0 && found <= 1e9) || found != std::floor(found)) throw Error(std::string("not a policy of a known format: ") + what);
  return static_cast<std::size_t>(found);
}

inline Shape shape_of(const Json& json) {
  Shape shape;
  for (const Json& size : json.items()) shape.push_back(whole(size, "shape"));
  return shape;
}

inline Leaf leaf_of(const Json& json) {
  Leaf leaf;
  leaf.kind = json["kind"].text(), leaf.path = json["path"].text("action"), leaf.shape = shape_of(json["shape"]);
  const std::string& name = json["dtype"].text();
  const auto* found = std::find_if(std::begin(dtypes), std::end(dtypes), [&](const DTypeFacts& one) { return name == one.name; });
  if (found == std::end(dtypes)) throw Error("the policy has numbers of type " + name + ", which this header does not know");
  leaf.dtype = static_cast<DType>(found - std::begin(dtypes));
  for (const Json& size : json["sizes"].items()) leaf.sizes.push_back(static_cast<std::int64_t>(size.number()));
  for (const Json& start : json["start"].items()) leaf.start.push_back(static_cast<std::int64_t>(start.number()));
  for (const Json& low : json["low"].items()) leaf.low.push_back(low.number(-std::numeric_limits<double>::infinity()));
  for (const Json& high : json["high"].items()) leaf.high.push_back(high.number(std::numeric_limits<double>::infinity()));
  if (json["stack"].type() == Json::Type::number) leaf.stack = whole(json["stack"], "stack");
  return leaf;
}

/// An element of any of the wire's types, as a number.
inline double element(DType dtype, const std::uint8_t* data, std::size_t i) {
  const auto read = [&](auto zero) {
    std::memcpy(&zero, data + i * sizeof zero, sizeof zero);
    return static_cast<double>(zero);
  };
  switch (dtype) {
    case DType::u8: return read(std::uint8_t{});
    case DType::i8: return read(std::int8_t{});
    case DType::u16: return read(std::uint16_t{});
    case DType::i16: return read(std::int16_t{});
    case DType::u32: return read(std::uint32_t{});
    case DType::i32: return read(std::int32_t{});
    case DType::u64: return read(std::uint64_t{});
    case DType::i64: return read(std::int64_t{});
    case DType::f32: return read(float{});
    default: return read(double{});
  }
}

/// One leaf of an observation on its way into the network.
/// Whether a mask leaves nothing to choose, for any element of an action.
inline bool forbids_all(const std::uint8_t* flags, const Leaf& action) {
  for (const std::int64_t size : action.sizes) {
    if (std::find_if(flags, flags + size, [](std::uint8_t flag) { return flag != 0; }) == flags + size) return true;
    flags += size;
  }
  return false;
}

struct NetInput {
  std::string path, encoding;
  Shape shape;
  std::vector<std::int64_t> sizes, start;
  std::size_t stack = 1, leaf = 0;
  DType dtype = DType::f32;

  std::size_t width() const {
    std::size_t sum = 0;
    for (const std::int64_t size : sizes) sum += static_cast<std::size_t>(size);
    return encoding == "onehot" ? sum : product(shape);
  }
  bool channels_last() const {
    if (shape.size() < 3 + (stack > 1 ? 1u : 0u)) return false;
    const std::size_t first = shape[shape.size() - 3], middle = shape[shape.size() - 2], last = shape.back();
    const auto usual = [](std::size_t n) { return n == 1 || n == 3 || n == 4; };
    if ((first == middle) != (middle == last)) return first == middle;
    if (usual(first) != usual(last)) return usual(last);
    return last < first;
  }
  /// Channels, height, width.
  Shape image() const {
    Shape whole = shape.size() > 2 ? shape : Shape{1, shape.at(0), shape.at(1)};
    std::size_t frames = 1;
    for (std::size_t i = 0; i + 3 < whole.size(); ++i) frames *= whole[i];
    const std::size_t a = whole[whole.size() - 3], b = whole[whole.size() - 2], c = whole.back();
    return channels_last() ? Shape{frames * c, a, b} : Shape{frames * a, b, c};
  }
  void write_flat(const std::uint8_t* data, float* to) const {
    const std::size_t count = product(shape);
    if (encoding == "onehot") {
      std::fill(to, to + width(), 0.0f);
      std::size_t at = 0;
      for (std::size_t i = 0; i < count; at += static_cast<std::size_t>(sizes[i++])) {
        const auto choice = static_cast<std::int64_t>(element(dtype, data, i)) - (i < start.size() ? start[i] : 0);
        if (choice < 0 || choice >= sizes[i]) throw Error("observation " + path + " is outside of its space");
        to[at + static_cast<std::size_t>(choice)] = 1.0f;
      }
    } else if (dtype == DType::f32) {
      std::memcpy(to, data, 4 * count);
    } else {
      const float scale = encoding == "image" ? 1.0f / 255 : 1.0f;
      for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<float>(element(dtype, data, i)) * scale;
    }
  }
  void write_image(const std::uint8_t* data, float* to) const {
    const Shape chw = image();
    const std::size_t pixels = chw[1] * chw[2], channels = channels_last() ? shape.back() : 1, frames = chw[0] / channels;
    const float scale = encoding == "image" ? 1.0f / 255 : 1.0f;
    for (std::size_t frame = 0; frame < frames; ++frame)  // of one channel each, where channels are in front
      for (std::size_t pixel = 0; pixel < pixels; ++pixel)
        for (std::size_t channel = 0; channel < channels; ++channel)
          to[(frame * channels + channel) * pixels + pixel] =
              static_cast<float>(element(dtype, data, (frame * pixels + pixel) * channels + channel)) * scale;
  }
};

struct NetLayer {
  enum class Kind { linear, conv, layer_norm, tanh, relu, elu, silu } kind;
  Shape in, out;
  std::size_t kernel = 0, stride = 1, weight = 0, bias = 0;  // offsets into the flat vector
  Shape unpadded;                 // of a convolution that adds zeros: its image without them; `in` is with them
  std::size_t top = 0, left = 0;  // how many of them are in front
  double eps = 1e-5;
};

/// `y += v * x`, in blocks that compilers make vectors of at -O2.
inline void add_scaled(float* __restrict y, const float* __restrict x, float v, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::size_t k = 0; k < 8; ++k) y[i + k] += v * x[i + k];
  for (; i < count; ++i) y[i] += v * x[i];
}

/// A rational function that is tanh to 1e-6.
inline float tanh_of(float x) {
  x = std::min(7.9f, std::max(-7.9f, x));
  const float s = x * x;
  float p = -2.76076847742355e-16f;
  for (const float c : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f, 1.48572235717979e-05f, 6.37261928875436e-04f, 4.89352455891786e-03f}) p = p * s + c;
  float q = 1.19825839466702e-06f;
  for (const float c : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f}) q = q * s + c;
  return x * p / q;
}
inline void tanh_all(float* x, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::size_t k = 0; k < 8; ++k) x[i + k] = tanh_of(x[i + k]);
  for (; i < count; ++i) x[i] = tanh_of(x[i]);
}

struct NetTower {
  std::string name;
  std::vector<std::string> sources;
  std::vector<NetLayer> layers;
  Shape out;
};

}  // namespace detail

/// A trained policy that acts, as `raynforce.load` does: from the files of a checkpoint, without Python. Not to be shared by threads: copy it.
class Policy {
 public:
  /// From a run directory (its best policy) or a checkpoint.
  static Policy load(const std::string& path) {
    std::string folder = path;
    if (std::FILE* file = std::fopen((folder + "/policy.json").c_str(), "rb"); file != nullptr) std::fclose(file);
    else folder += "/best";
    const std::string text = detail::read_file(folder + "/policy.json"), data = detail::read_file(folder + "/policy.safetensors");
    const Json manifest = Json::parse(detail::read_file(folder + "/manifest.json"));
    for (const auto& [name, content] : {std::pair<std::string, const std::string&>{"policy.json", text}, {"policy.safetensors", data}})
      if (const std::string& hash = manifest["files"][name]["sha256"].text(); hash != detail::hex(detail::sha256(content)))
        throw Error(folder + "/" + name + " is damaged: its hash is not that of manifest.json");
    const Json json = Json::parse(text, 32, true);
    Policy policy(json["acting"]);
    policy.set(data, json["version"]);
    return policy;
  }

  /// From the `acting` part of policy.json; `set` gives it parameters.
  explicit Policy(const Json& acting) {
    if (acting.type() != Json::Type::object) throw Error("not a policy of a known format: acting is missing");
    if (!acting["factory"].is_null()) throw Error("this policy is a torch module of the user's (" + acting["factory"].text() + "): only networks that the config describes can be read");
    for (const Json& leaf : acting["env"]["obs"].items()) spaces_.obs.push_back(detail::leaf_of(leaf));
    spaces_.action = detail::leaf_of(acting["env"]["action"]);
    greedy_only_ = acting["exploration"].text() == "epsilon";
    const std::string gaussian = acting["gaussian"].text("free");
    if (gaussian != "free" && gaussian != "wide" && gaussian != "squashed") throw Error("this policy has a Gaussian that is " + gaussian + ", which this header does not know");
    squashed_ = gaussian == "squashed", wide_ = gaussian != "free";
    least_ = acting["log_std_range"][0].number(-20), most_ = acting["log_std_range"][1].number(2);
    head_ = greedy_only_ ? acting["values"].text("q") : "policy";
    build(acting["network"]);
  }

  const Spaces& spaces() const { return spaces_; }
  std::uint64_t version() const { return version_; }

  /// Take the parameters of a policy version: the bytes of its safetensors, and the `version` part of its JSON.
  void set(const std::string& safetensors, const Json& version) {
    if (safetensors.size() < 8) throw Error("policy.safetensors is too short");
    std::uint64_t header = 0;
    std::memcpy(&header, safetensors.data(), 8);
    if (header > safetensors.size() - 8) throw Error("policy.safetensors is too short");
    const Json table = Json::parse(std::string_view(safetensors).substr(8, header));
    const auto array = [&](const char* name, std::size_t count) {
      const Json& entry = table[name];
      const std::size_t begin = detail::whole(entry["data_offsets"][0], name), end = detail::whole(entry["data_offsets"][1], name);
      if (entry["dtype"].text() != "F32" || end < begin || end - begin != 4 * count || end > safetensors.size() - 8 - header)
        throw Error(std::string("policy.safetensors has no ") + name + " of " + std::to_string(count) + " numbers");
      std::vector<float> found(count);
      std::memcpy(found.data(), safetensors.data() + 8 + header + begin, 4 * count);
      return found;
    };
    params_ = array("version/params", size_);
    if (normalize_) shift_ = array("version/shift", width_), scale_ = array("version/scale", width_);
    version_ = static_cast<std::uint64_t>(version["number"].number());
    epsilon_ = version["schedules"]["epsilon"].number(0);
  }

  /// The network's output by which the policy acts: logits, means or action values.
  const std::vector<float>& outputs(const std::vector<const void*>& obs) {
    if (params_.empty()) throw Error("this policy has no parameters yet");
    if (obs.size() != spaces_.obs.size()) throw Error("an observation has " + std::to_string(spaces_.obs.size()) + " leaves, not " + std::to_string(obs.size()));
    values_.clear();
    std::size_t at = 0;
    if (width_ != 0) {
      std::vector<float>& input = values_["input"];
      input.resize(width_);
      for (const detail::NetInput& one : flat_) one.write_flat(static_cast<const std::uint8_t*>(obs[one.leaf]), input.data() + at), at += one.width();
      if (normalize_)
        for (std::size_t i = 0; i < width_; ++i) input[i] = std::min(10.0f, std::max(-10.0f, (input[i] - shift_[i]) * scale_[i]));
    }
    for (const detail::NetInput& one : images_) {
      std::vector<float>& pixels = values_[one.path];
      pixels.resize(detail::product(one.shape));
      one.write_image(static_cast<const std::uint8_t*>(obs[one.leaf]), pixels.data());
    }
    for (const detail::NetTower& tower : towers_) run(tower);
    return values_.at(head_);
  }

  /// Chooses for one observation, given as a pointer for each leaf in the order of `spaces().obs`, and writes the action
  /// that the environment takes. The best one, or with a random generator one as in training. If there is a leaf
  /// `obs/action_mask`, one that it allows.
  template <class Random = std::nullptr_t>
  void act(const std::vector<const void*>& obs, void* action, Random&& random = nullptr) {
    const std::vector<float>& out = allowed_outputs(obs);
    const Leaf& leaf = spaces_.action;
    const std::size_t count = leaf.elements();
    if (leaf.kind == "box") {
      for (std::size_t i = 0; i < count; ++i) {
        double value = out[i];
        if constexpr (!std::is_same_v<std::decay_t<Random>, std::nullptr_t>) value += std::exp(log_std(out, i)) * normal(random);
        static_cast<float*>(action)[i] = bounded(i, squashed_ ? std::tanh(value) : value);
      }
      return;
    }
    std::size_t at = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto choices = static_cast<std::size_t>(leaf.sizes[i]);
      std::size_t best = 0;
      double highest = -std::numeric_limits<double>::infinity();
      for (std::size_t choice = 0; choice < choices; ++choice) {
        double value = out[at + choice];
        if constexpr (!std::is_same_v<std::decay_t<Random>, std::nullptr_t>)
          if (!greedy_only_) value -= std::log(-std::log(uniform(random)));  // Gumbel noise: the largest is a sample
        if (value > highest) highest = value, best = choice;
      }
      if constexpr (!std::is_same_v<std::decay_t<Random>, std::nullptr_t>)
        if (greedy_only_ && uniform(random) < epsilon_) best = any(out.data() + at, choices, uniform(random));
      static_cast<std::int64_t*>(action)[i] = static_cast<std::int64_t>(best) + (i < leaf.start.size() ? leaf.start[i] : 0);
      at += choices;
    }
  }

  /// Samples as in training: writes the action that the environment takes and the one that is learned from, before start and bounds;
  /// the log-probability of that one. `exponent` is that of epsilon, for action values.
  template <class Random>
  float sample(const std::vector<const void*>& obs, void* action, void* recorded, Random& random, double exponent = 1) {
    const std::vector<float>& out = allowed_outputs(obs);
    const Leaf& leaf = spaces_.action;
    const std::size_t count = leaf.elements();
    double logp = 0;
    if (leaf.kind == "box") {
      for (std::size_t i = 0; i < count; ++i) {
        const double spread = log_std(out, i), drawn = out[i] + std::exp(spread) * normal(random);
        const auto value = static_cast<float>(squashed_ ? std::tanh(drawn) : drawn);
        double raw = value;
        if (squashed_) {
          raw = std::atanh(std::min(1 - 1e-6, std::max(-1 + 1e-6, raw)));
          logp -= 2 * (0.6931471805599453 - raw - std::max(-2 * raw, 0.0) - std::log1p(std::exp(-2 * std::abs(raw))));  // log of tanh's derivative
        }
        const double z = (raw - out[i]) * std::exp(-spread);
        logp -= 0.5 * z * z + spread + 0.9189385332046727;  // half of log 2 pi
        static_cast<float*>(recorded)[i] = value, static_cast<float*>(action)[i] = bounded(i, value);
      }
      return static_cast<float>(logp);
    }
    const float* logits = out.data();
    for (std::size_t i = 0; i < count; ++i) {
      const auto choices = static_cast<std::size_t>(leaf.sizes[i]);
      const std::size_t highest = static_cast<std::size_t>(std::max_element(logits, logits + choices) - logits);
      std::size_t chosen = highest;
      if (greedy_only_) {
        if (uniform(random) < std::pow(epsilon_, exponent)) chosen = any(logits, choices, uniform(random));
      } else {
        double total = 0;
        for (std::size_t choice = 0; choice < choices; ++choice) total += std::exp(static_cast<double>(logits[choice]) - logits[highest]);
        double left = uniform(random) * total;
        for (chosen = 0; chosen + 1 < choices; ++chosen)
          if ((left -= std::exp(static_cast<double>(logits[chosen]) - logits[highest])) < 0) break;
        while (chosen > 0 && logits[chosen] == forbidden) --chosen;  // where rounding has left a rest
        logp += static_cast<double>(logits[chosen]) - logits[highest] - std::log(total);
      }
      static_cast<std::int64_t*>(recorded)[i] = static_cast<std::int64_t>(chosen);
      static_cast<std::int64_t*>(action)[i] = static_cast<std::int64_t>(chosen) + (i < leaf.start.size() ? leaf.start[i] : 0);
      logits += choices;
    }
    return static_cast<float>(logp);
  }

  /// How many numbers a version has: parameters, and of the normaliser shift and scale each (0 if there is none).
  std::size_t size() const { return size_; }
  std::size_t normalizer_size() const { return normalize_ ? width_ : 0; }

  /// Take the parameters of a policy version as they lie in memory.
  void set(const std::uint8_t* params, const std::uint8_t* shift, const std::uint8_t* scale, std::uint64_t version, double epsilon) {
    const auto copy = [](std::vector<float>& to, const std::uint8_t* from, std::size_t count) {
      to.resize(count);
      if (count != 0) std::memcpy(to.data(), from, 4 * count);
    };
    copy(params_, params, size_), copy(shift_, shift, normalizer_size()), copy(scale_, scale, normalizer_size());
    version_ = version, epsilon_ = epsilon;
  }

  /// The choice of a discrete action, for an observation that is one array.
  std::int64_t choose(const void* obs) {
    if (spaces_.action.kind != "discrete") throw Error("the action is no single choice: use act");
    std::int64_t choice = 0;
    act({obs}, &choice);
    return choice;
  }

 private:
  static constexpr float forbidden = -std::numeric_limits<float>::infinity();

  /// The outputs, minus infinity where a choice is not allowed.
  const std::vector<float>& allowed_outputs(const std::vector<const void*>& obs) {
    const std::vector<float>& out = outputs(obs);
    const auto mask = std::find_if(spaces_.obs.begin(), spaces_.obs.end(), [](const Leaf& leaf) { return leaf.path == "obs/action_mask"; });
    if (mask == spaces_.obs.end()) return out;
    const auto* flags = static_cast<const std::uint8_t*>(obs[static_cast<std::size_t>(mask - spaces_.obs.begin())]);
    if (mask->bytes() != out.size() || spaces_.action.kind == "box") throw Error("obs/action_mask has " + std::to_string(mask->bytes()) + " bytes for " + std::to_string(out.size()) + " choices");
    if (detail::forbids_all(flags, spaces_.action)) throw Error("obs/action_mask forbids every choice: at least one must be allowed");
    allowed_ = out;
    for (std::size_t i = 0; i < out.size(); ++i)
      if (flags[i] == 0) allowed_[i] = forbidden;
    return allowed_;
  }
  /// Any of the choices that are allowed, by a number between 0 and 1.
  static std::size_t any(const float* values, std::size_t choices, double share) {
    const auto count = choices - static_cast<std::size_t>(std::count(values, values + choices, forbidden));
    std::size_t left = std::min(count - 1, static_cast<std::size_t>(share * static_cast<double>(count))), choice = 0;
    while (values[choice] == forbidden || left-- > 0) ++choice;
    return choice;
  }
  template <class Random>
  static double uniform(Random& random) {  // between 0 and 1, neither of them
    return (static_cast<double>(static_cast<std::uint64_t>(random()) >> 11 & ((1ull << 53) - 1)) + 0.5) * 0x1p-53;
  }
  template <class Random>
  static double normal(Random& random) {
    return std::sqrt(-2 * std::log(uniform(random))) * std::cos(6.283185307179586 * uniform(random));
  }

  double log_std(const std::vector<float>& out, std::size_t i) const {
    if (!wide_) return params_[log_std_ + i];
    return std::min(most_, std::max(least_, static_cast<double>(out[spaces_.action.elements() + i])));
  }

  float bounded(std::size_t i, double value) const {
    const Leaf& leaf = spaces_.action;
    const double low = i < leaf.low.size() ? leaf.low[i] : -INFINITY, high = i < leaf.high.size() ? leaf.high[i] : INFINITY;
    const auto finite = [](const std::vector<double>& bounds) { return std::all_of(bounds.begin(), bounds.end(), [](double b) { return std::isfinite(b); }); };
    if (!leaf.low.empty() && finite(leaf.low) && finite(leaf.high)) value = (high + low) / 2 + (high - low) / 2 * value;
    const float inside = static_cast<float>(std::min(high, std::max(low, value)));  // to be within, also as a float
    if (inside > high) return std::nextafter(inside, -std::numeric_limits<float>::infinity());
    return inside < low ? std::nextafter(inside, std::numeric_limits<float>::infinity()) : inside;
  }

  void build(const Json& network) {
    using detail::NetLayer;
    std::vector<detail::NetInput> inputs;
    for (const Json& json : network["inputs"].items()) {
      detail::NetInput input;
      input.path = json["path"].text(), input.encoding = json["encoding"].text(), input.shape = detail::shape_of(json["shape"]);
      const Leaf as_leaf = detail::leaf_of(Json::object({{"path", input.path}, {"kind", "box"}, {"dtype", "float32"}, {"shape", json["shape"]}, {"sizes", json["sizes"]}, {"start", json["start"]}}));
      input.sizes = as_leaf.sizes, input.start = as_leaf.start;
      if (json["stack"].type() == Json::Type::number) input.stack = detail::whole(json["stack"], "stack");
      const auto leaf = std::find_if(spaces_.obs.begin(), spaces_.obs.end(), [&](const Leaf& one) { return one.path == input.path; });
      if (leaf == spaces_.obs.end()) throw Error("the network reads " + input.path + ", which is no part of the observation");
      input.leaf = static_cast<std::size_t>(leaf - spaces_.obs.begin()), input.dtype = leaf->dtype;
      if (detail::product(input.shape) != leaf->elements() || (input.encoding == "onehot" && input.sizes.size() != leaf->elements()))
        throw Error("the network reads " + input.path + " in another shape");
      inputs.push_back(std::move(input));
    }
    bool convolves_input = false;
    std::vector<std::string> read;
    for (const Json& json : network["towers"].items()) {
      detail::NetTower tower;
      tower.name = json["name"].text();
      if (json["source"].type() == Json::Type::text) tower.sources = {json["source"].text()};
      for (const Json& source : json["source"].items()) tower.sources.push_back(source.text());
      for (const Json& layer : json["layers"].items())
        convolves_input = convolves_input || (layer["type"].text() == "Conv" && tower.sources == std::vector<std::string>{"input"});
      towers_.push_back(std::move(tower));
    }
    for (detail::NetTower& tower : towers_)
      for (std::string& source : tower.sources) {
        if (convolves_input && source == "input") source = inputs.at(0).path;
        read.push_back(source);
      }
    std::map<std::string, detail::Shape> shapes;
    for (const detail::NetInput& input : inputs) {
      if (std::find(read.begin(), read.end(), input.path) != read.end()) {
        images_.push_back(input);
        shapes[input.path] = input.image();
      } else {
        flat_.push_back(input);
        width_ += input.width();
      }
    }
    if (width_ != 0) shapes["input"] = {width_};
    std::vector<std::string> named;  // what only learning has, such as the action that a critic reads
    for (const Json& json : network["named"].items()) {
      std::size_t width = 0;
      for (const Json& size : json["sizes"].items()) width += detail::whole(size, "sizes");
      named.push_back(json["path"].text());
      shapes[named.back()] = {json["encoding"].text() == "onehot" ? width : detail::product(detail::shape_of(json["shape"]))};
    }
    normalize_ = network["normalize"].boolean() && width_ != 0;
    for (std::size_t t = 0; t < towers_.size(); ++t) add_layers(towers_[t], network["towers"][t]["layers"], shapes);
    for (const Json& free : network["free"].items()) {
      if (free["name"].text() == "log_std") log_std_ = size_;
      size_ += detail::whole(free["size"], "size");
    }
    if (shapes.find(head_) == shapes.end()) throw Error("the network has no output " + head_);
    std::size_t wanted = 0;
    if (spaces_.action.kind == "box") wanted = spaces_.action.elements() * (wide_ ? 2 : 1);
    for (const std::int64_t size : spaces_.action.sizes) wanted += static_cast<std::size_t>(size);
    if (detail::product(shapes[head_]) != wanted) throw Error("the network's output does not fit the action");
    prune();
    for (const detail::NetTower& tower : towers_)
      for (const std::string& source : tower.sources)
        if (std::find(named.begin(), named.end(), source) != named.end()) throw Error("tower " + tower.name + " reads " + source + ", which this header cannot give it");
  }

  void add_layers(detail::NetTower& tower, const Json& layers, std::map<std::string, detail::Shape>& shapes) {
    using detail::NetLayer;
    detail::Shape shape;
    std::size_t joined = 0;
    for (const std::string& source : tower.sources) {
      const auto found = shapes.find(source);
      if (found == shapes.end()) throw Error("tower " + tower.name + " reads " + source + ", which this header cannot give it");
      shape = found->second, joined += detail::product(shape);
    }
    if (tower.sources.size() > 1) shape = {joined};
    for (const Json& json : layers.items()) {
      const std::string& type = json["type"].text();
      NetLayer layer{};
      layer.in = shape;
      if (type == "Linear") {
        layer.kind = NetLayer::Kind::linear;
        layer.in = {detail::product(shape)}, layer.out = {detail::whole(json["size"], "size")};
        require_room({layer.in[0], layer.out[0]});
        layer.weight = size_, layer.bias = size_ + layer.in[0] * layer.out[0], size_ = layer.bias + layer.out[0];
      } else if (type == "Conv") {
        layer.kind = NetLayer::Kind::conv;
        layer.kernel = detail::whole(json["kernel"], "kernel"), layer.stride = detail::whole(json["stride"], "stride");
        const std::size_t channels = detail::whole(json["channels"], "channels");
        if (shape.size() != 3 || layer.kernel == 0 || layer.stride == 0) throw Error("a convolution of tower " + tower.name + " does not fit");
        if (const std::string padding = json["padding"].text("valid"); padding == "same") {
          const auto missing = [&](std::size_t side) {
            const std::size_t wanted = ((side + layer.stride - 1) / layer.stride - 1) * layer.stride + layer.kernel;
            return wanted > side ? wanted - side : 0;
          };
          const std::size_t rows = missing(shape[1]), columns = missing(shape[2]);
          layer.unpadded = shape, layer.top = rows / 2, layer.left = columns / 2;
          shape[1] += rows, shape[2] += columns, layer.in = shape;
        } else if (padding != "valid") {
          throw Error("the network has a convolution with padding " + padding + ", which this header does not know");
        }
        if (shape[1] < layer.kernel || shape[2] < layer.kernel) throw Error("a convolution of tower " + tower.name + " does not fit");
        require_room({channels, shape[0], layer.kernel, layer.kernel}), require_room({channels, shape[1], shape[2]});
        layer.out = {channels, (shape[1] - layer.kernel) / layer.stride + 1, (shape[2] - layer.kernel) / layer.stride + 1};
        layer.weight = size_, layer.bias = size_ + channels * shape[0] * layer.kernel * layer.kernel, size_ = layer.bias + channels;
      } else if (type == "LayerNorm") {
        layer.kind = NetLayer::Kind::layer_norm;
        layer.eps = json["eps"].number(1e-5);
        layer.out = shape, layer.weight = size_, layer.bias = size_ + detail::product(shape), size_ = layer.bias + detail::product(shape);
      } else if (type == "Activation") {
        static const std::map<std::string, NetLayer::Kind> kinds = {
            {"tanh", NetLayer::Kind::tanh}, {"relu", NetLayer::Kind::relu}, {"elu", NetLayer::Kind::elu}, {"silu", NetLayer::Kind::silu}};
        const auto kind = kinds.find(json["name"].text());
        if (kind == kinds.end()) throw Error("the network has an activation " + json["name"].text() + ", which this header does not know");
        layer.kind = kind->second, layer.out = shape;
      } else {
        throw Error("the network has a layer " + type + ", which this header does not know");
      }
      shape = layer.out;
      tower.layers.push_back(std::move(layer));
    }
    tower.out = shape, shapes[tower.name] = shape;
  }

  static void require_room(const detail::Shape& sizes) {
    double product = 1;
    for (const std::size_t size : sizes) product *= static_cast<double>(size);
    if (product > 1e9) throw Error("a layer of the network is too large");
  }

  /// Towers that the action does not depend on are not computed.
  void prune() {
    std::vector<std::string> needed = {head_};
    std::vector<detail::NetTower> kept;
    for (std::size_t t = towers_.size(); t-- > 0;)
      if (std::find(needed.begin(), needed.end(), towers_[t].name) != needed.end()) {
        needed.insert(needed.end(), towers_[t].sources.begin(), towers_[t].sources.end());
        kept.insert(kept.begin(), towers_[t]);
      }
    towers_ = std::move(kept);
  }

  void run(const detail::NetTower& tower) {
    std::vector<float> now;
    for (const std::string& source : tower.sources) {
      const std::vector<float>& part = values_.at(source);
      now.insert(now.end(), part.begin(), part.end());
    }
    for (const detail::NetLayer& layer : tower.layers) now = apply(layer, std::move(now));
    values_[tower.name] = std::move(now);
  }

  std::vector<float> apply(const detail::NetLayer& layer, std::vector<float> x) const {
    using Kind = detail::NetLayer::Kind;
    switch (layer.kind) {
      case Kind::tanh: detail::tanh_all(x.data(), x.size()); return x;
      case Kind::relu: for (float& v : x) v = std::max(v, 0.0f); return x;
      case Kind::elu: for (float& v : x) v = v > 0 ? v : std::expm1(v); return x;
      case Kind::silu: for (float& v : x) v = v / 2 * (std::tanh(v / 2) + 1); return x;
      case Kind::layer_norm: {
        double mean = 0, variance = 0;
        for (const float v : x) mean += v;
        mean /= static_cast<double>(x.size());
        for (const float v : x) variance += (v - mean) * (v - mean);
        const double scale = 1 / std::sqrt(variance / static_cast<double>(x.size()) + layer.eps);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((x[i] - mean) * scale) * params_[layer.weight + i] + params_[layer.bias + i];
        return x;
      }
      case Kind::linear: {
        const std::size_t size = layer.out[0];
        std::vector<float> y(params_.begin() + static_cast<std::ptrdiff_t>(layer.bias), params_.begin() + static_cast<std::ptrdiff_t>(layer.bias + size));
        const float* weight = params_.data() + layer.weight;
        for (std::size_t i = 0; i < x.size(); ++i, weight += size) {
          const float v = x[i];
          if (v == 0) continue;
          detail::add_scaled(y.data(), weight, v, size);
        }
        return y;
      }
      default: return convolve(layer, layer.unpadded.empty() ? std::move(x) : padded(layer, x));
    }
  }

  static std::vector<float> padded(const detail::NetLayer& layer, const std::vector<float>& x) {
    std::vector<float> y(detail::product(layer.in));
    const std::size_t rows = layer.unpadded[1], columns = layer.unpadded[2];
    for (std::size_t c = 0; c < layer.in[0]; ++c)
      for (std::size_t row = 0; row < rows; ++row)
        std::copy_n(x.data() + (c * rows + row) * columns, columns, y.data() + (c * layer.in[1] + layer.top + row) * layer.in[2] + layer.left);
    return y;
  }

  std::vector<float> convolve(const detail::NetLayer& layer, const std::vector<float>& x) const {
    const std::size_t channels = layer.in[0], width = layer.in[2], k = layer.kernel, rows = layer.out[1], columns = layer.out[2];
    std::vector<float> y(detail::product(layer.out));
    for (std::size_t o = 0; o < layer.out[0]; ++o) {
      float* to = y.data() + o * rows * columns;
      std::fill(to, to + rows * columns, params_[layer.bias + o]);
      for (std::size_t c = 0; c < channels; ++c)
        for (std::size_t i = 0; i < k; ++i)
          for (std::size_t j = 0; j < k; ++j) {
            const float weight = params_[layer.weight + ((o * channels + c) * k + i) * k + j];
            const float* from = x.data() + c * layer.in[1] * width + i * width + j;
            for (std::size_t row = 0; row < rows; ++row)
              for (std::size_t column = 0; column < columns; ++column) to[row * columns + column] += weight * from[(row * width + column) * layer.stride];
          }
    }
    return y;
  }

  Spaces spaces_;
  std::string head_;
  bool greedy_only_ = false, normalize_ = false, wide_ = false, squashed_ = false;
  double least_ = -20, most_ = 2;  // what a wide or squashed Gaussian's log standard deviations are clipped to
  std::vector<detail::NetInput> images_, flat_;
  std::vector<detail::NetTower> towers_;
  std::size_t size_ = 0, width_ = 0, log_std_ = 0;
  std::vector<float> params_, shift_, scale_, allowed_;
  std::map<std::string, std::vector<float>> values_;
  std::uint64_t version_ = 0;
  double epsilon_ = 0;
};

// -- fragments, for trainers that leave the choice of actions to the simulator ----------------------------------------

namespace detail {

/// Random numbers of one env in one fragment.
struct Stream {
  std::uint64_t state = 0;
  std::uint64_t operator()() {
    const std::uint64_t found = mixed(state);
    state += 0x9e3779b97f4a7c15;
    return found;
  }
};

class Fragments final : public Gatherer {
 public:
  Fragments(const Json& welcome, const Spaces& spaces, std::size_t envs, std::uint8_t* const* rows)
      : spaces_(spaces), policy_(made(welcome["policy"], spaces)), rows_(rows, rows + spaces.obs.size()), count_(envs), finite_(welcome["finite"].boolean(true)), lanes_(envs) {
    length_ = number(welcome["fragment"], 1, 1e6, "fragment");
    const std::size_t cells = length_ * count_;
    for (const Leaf& leaf : spaces_.obs) {
      if (leaf.bytes() > (std::size_t{1} << 30) / (cells + count_)) throw Violation("limit", "a fragment would have more than 2^30 bytes");
      obs_.emplace_back((cells + count_) * leaf.bytes()), safe_.emplace_back(count_ * leaf.bytes()), finals_.emplace_back();
    }
    action_bytes_ = spaces_.action.bytes();
    actions_.resize(cells * action_bytes_);
    logp_.resize(cells), rewards_.resize(cells), status_.resize(cells), versions_.resize(cells);
    shown_.resize(spaces_.obs.size());
    const std::vector<Json>& exponents = welcome["policy"]["exponents"].items();
    if (!exponents.empty() && exponents.size() != count_) throw Violation("field", "exponents are not one for each env");
    for (std::size_t env = 0; env < exponents.size(); ++env) lanes_[env].exponent = exponents[env].number(1);
  }

  std::size_t policy_bytes() const override { return padded(4 * policy_.size()) + 2 * padded(4 * policy_.normalizer_size()); }
  std::size_t policy_buffers() const override { return policy_.normalizer_size() == 0 ? 1 : 3; }
  void set(const Json& meta, const std::uint8_t* body) override {
    const std::uint8_t *shift = body + padded(4 * policy_.size()), *scale = shift + padded(4 * policy_.normalizer_size());
    policy_.set(body, shift, scale, number(meta["version"], 0, 4294967295.0, "version"), meta["schedules"]["epsilon"].number(0));
    ready_ = true;
  }
  void ask(const Json& meta, std::uint64_t sequence) override {
    if (!ready_) throw Violation("state", "SAMPLE came before POLICY");
    if (asked_.size() >= 64) throw Violation("limit", "more than 64 fragments are asked for");
    asked_.push_back({sequence, static_cast<std::uint64_t>(number(meta["seed"], 0, 9007199254740992.0, "seed"))});
    if (asked_.size() == 1) start();
  }
  void begin(std::size_t env) override { copy_row(safe_, env, env, true); }

  bool wants(std::size_t env, bool realtime) override { return ready_ && (realtime || (!asked_.empty() && lanes_[env].row < length_)); }

  void choose(std::size_t env, bool reset, std::uint8_t* action) override {
    Lane& lane = lanes_[env];
    lane.recorded = !asked_.empty() && lane.row < length_;
    const std::size_t cell = lane.row * count_ + env;
    if (lane.recorded) copy_row(obs_, cell, env, true), versions_[cell] = static_cast<std::uint32_t>(policy_.version());
    std::uint8_t* recorded = lane.recorded ? actions_.data() + cell * action_bytes_ : spare(action_bytes_);
    float logp = 0;
    if (reset) {
      std::memset(recorded, 0, action_bytes_);
    } else {
      for (std::size_t leaf = 0; leaf < shown_.size(); ++leaf) shown_[leaf] = rows_[leaf] + env * spaces_.obs[leaf].bytes();
      logp = policy_.sample(shown_, action, recorded, lane.random, lane.exponent);
    }
    if (lane.recorded) logp_[cell] = logp;
  }

  std::string wrong(std::size_t env, double reward, bool over) const override {
    if (finite_ && !std::isfinite(reward)) return "reward is not finite";
    for (std::size_t leaf = 0; leaf < spaces_.obs.size(); ++leaf)
      if (!fits(spaces_.obs[leaf], rows_[leaf] + env * spaces_.obs[leaf].bytes())) return spaces_.obs[leaf].path + " has a value that its space does not have";
    for (std::size_t leaf = 0; leaf < spaces_.obs.size(); ++leaf)
      if (!over && spaces_.obs[leaf].path == "obs/action_mask" && forbids_all(rows_[leaf] + env * spaces_.obs[leaf].bytes(), spaces_.action)) return "obs/action_mask forbids every choice";
    return "";
  }

  void end(std::size_t env, double total, std::uint32_t length, const std::vector<std::pair<std::string, double>>& info) override {
    Lane& lane = lanes_[env];
    if (!lane.recorded) return;
    ends_.push_back({lane.row * count_ + env, finals_count_++, total, length, info});
    for (std::size_t leaf = 0; leaf < finals_.size(); ++leaf) {
      const std::size_t bytes = spaces_.obs[leaf].bytes();
      const std::uint8_t* from = rows_[leaf] + env * bytes;
      finals_[leaf].insert(finals_[leaf].end(), from, from + bytes);
    }
  }

  void broke(std::size_t env, const std::string& why, bool blind) override {
    const bool value = why.find(" has a value that its space does not have") != std::string::npos || why == "reward is not finite" || why == "obs/action_mask forbids every choice";
    if (broken_.size() < 256) broken_[env] = {value ? "value" : "raised", why};
    if (blind) copy_row(safe_, env, env, false);
  }

  void record(std::size_t env, float reward, std::uint8_t status) override {
    Lane& lane = lanes_[env];
    if (!lane.recorded) {
      ++skipped_;
      return;
    }
    const std::size_t cell = lane.row * count_ + env;
    rewards_[cell] = reward, status_[cell] = status;
    if (++lane.row == length_) copy_row(obs_, length_ * count_ + env, env, true), ++done_;
  }

  bool full() const override { return done_ == count_; }
  std::size_t ended() const override { return ends_.size(); }

  Json meta() override {
    std::sort(ends_.begin(), ends_.end(), [](const End& a, const End& b) { return a.cell < b.cell; });
    Json meta = Json::object({{"request", asked_.front().sequence}});
    if (skipped_ != 0) meta.set("skipped", skipped_);
    std::size_t room = GREETING_META - 1024;
    const auto fits = [&](const Json& json) {
      const std::size_t bytes = json.dump().size() + 16;
      if (bytes > room) return false;
      room -= bytes;
      return true;
    };
    std::vector<std::pair<std::string, Json>> broken, info;
    for (const auto& [env, what] : broken_)
      if (Json one = Json::object({{"code", what.first}, {"text", what.second}}); fits(one)) broken.emplace_back(std::to_string(env), std::move(one));
    if (!broken.empty()) meta.set("broken", fields(std::move(broken)));
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      if (ends_[i].info.empty()) continue;
      Json own = Json::object();
      for (const auto& [name, value] : ends_[i].info) own.set(name, value);
      if (!fits(own)) break;
      info.emplace_back(std::to_string(i), std::move(own));
    }
    if (!info.empty()) meta.set("info", fields(std::move(info)));
    return meta;
  }

  std::vector<Part> parts() override {
    std::vector<Part> parts;
    const auto add = [&](const auto& values) { parts.push_back({values.data(), values.size() * sizeof(values[0])}); };
    for (const auto& leaf : obs_) add(leaf);
    add(actions_), add(logp_), add(rewards_), add(status_), add(versions_);
    returns_.clear(), lengths_.clear();
    for (const End& end : ends_) returns_.push_back(end.total), lengths_.push_back(end.length);
    add(returns_), add(lengths_);
    ordered_.resize(finals_.size());
    for (std::size_t leaf = 0; leaf < finals_.size(); ++leaf) {
      const std::size_t bytes = spaces_.obs[leaf].bytes();
      ordered_[leaf].resize(finals_[leaf].size());
      for (std::size_t i = 0; i < ends_.size(); ++i) std::memcpy(ordered_[leaf].data() + i * bytes, finals_[leaf].data() + ends_[i].place * bytes, bytes);
      add(ordered_[leaf]);
    }
    return parts;
  }

  void next() override {
    asked_.pop_front();
    ends_.clear(), broken_.clear();
    finals_count_ = skipped_ = done_ = 0;
    for (auto& leaf : finals_) leaf.clear();
    for (Lane& lane : lanes_) lane.row = 0;
    if (!asked_.empty()) start();
  }

 private:
  struct Lane {
    std::size_t row = 0;
    bool recorded = false;  // whether the step under way is part of the fragment
    double exponent = 1;
    Stream random;
  };
  struct End {
    std::size_t cell, place;
    double total;
    std::uint32_t length;
    std::vector<std::pair<std::string, double>> info;
  };
  struct Asked {
    std::uint64_t sequence, seed;
  };

  static Policy made(Json acting, const Spaces& spaces) {
    if (acting.type() != Json::Type::object) throw Violation("field", "policy is missing");
    if (spaces.action.dtype != (spaces.action.kind == "box" ? DType::f32 : DType::i64)) throw Error("with inference, actions are float32 or int64");
    acting.set("env", spaces.json());
    return Policy(acting);
  }
  static std::size_t number(const Json& json, double least, double most, const char* what) {
    const double found = json.number(-1);
    if (!(found >= least && found <= most) || found != std::floor(found)) throw Violation("field", std::string(what) + " is no number that can be");
    return static_cast<std::size_t>(found);
  }
  static Json fields(std::vector<std::pair<std::string, Json>> all) { return Json::object(std::move(all)); }

  /// The next fragment begins: its random streams follow from its seed.
  void start() {
    for (std::size_t env = 0; env < count_; ++env) lanes_[env].random.state = mixed(asked_.front().seed) ^ mixed(~std::uint64_t{env});
  }
  std::uint8_t* spare(std::size_t bytes) {
    spare_.resize(bytes);
    return spare_.data();
  }
  /// Copies what an env shows to a row of these arrays, or from there.
  void copy_row(std::vector<std::vector<std::uint8_t>>& arrays, std::size_t row, std::size_t env, bool to) {
    for (std::size_t leaf = 0; leaf < arrays.size(); ++leaf) {
      const std::size_t bytes = spaces_.obs[leaf].bytes();
      std::uint8_t *there = arrays[leaf].data() + row * bytes, *here = rows_[leaf] + env * bytes;
      std::memcpy(to ? there : here, to ? here : there, bytes);
    }
  }
  bool fits(const Leaf& leaf, const std::uint8_t* data) const {
    const std::size_t count = leaf.elements();
    if (leaf.dtype == DType::f32 || leaf.dtype == DType::f64) {
      if (!finite_) return true;
      for (std::size_t i = 0; i < count; ++i)
        if (!std::isfinite(element(leaf.dtype, data, i))) return false;
      return true;
    }
    if (leaf.kind == "multibinary") {
      for (std::size_t i = 0; i < count; ++i)
        if (const double found = element(leaf.dtype, data, i); found != 0 && found != 1) return false;
      return true;
    }
    for (std::size_t i = 0; i < leaf.sizes.size(); ++i) {
      const double found = element(leaf.dtype, data, i) - static_cast<double>(i < leaf.start.size() ? leaf.start[i] : 0);
      if (found < 0 || found >= static_cast<double>(leaf.sizes[i])) return false;
    }
    return true;
  }

  const Spaces& spaces_;
  Policy policy_;
  std::vector<std::uint8_t*> rows_;
  std::size_t count_, length_ = 0, action_bytes_ = 0, done_ = 0, skipped_ = 0, finals_count_ = 0;
  bool finite_, ready_ = false;
  std::vector<Lane> lanes_;
  std::deque<Asked> asked_;  // the fragment under way is of the first
  std::vector<std::vector<std::uint8_t>> obs_, safe_, finals_, ordered_;  // by leaf; `safe_` is a row for each env that can always be shown
  std::vector<std::uint8_t> actions_, status_, spare_;
  std::vector<float> logp_, rewards_;
  std::vector<std::uint32_t> versions_, lengths_;
  std::vector<double> returns_;
  std::vector<End> ends_;
  std::map<std::size_t, std::pair<std::string, std::string>> broken_;
  std::vector<const void*> shown_;
};

inline std::unique_ptr<Gatherer> make_gatherer(const Json& welcome, const Spaces& spaces, std::size_t envs, std::uint8_t* const* rows) {
  return std::make_unique<Fragments>(welcome, spaces, envs, rows);
}

}  // namespace detail

// -- engines that own their loop ----------------------------------------------------------------------------------------

/// Where the trainer is, how many envs there are, and who this is. `parse` reads the command line and the environment.
struct Options {
  std::string connect, listen;  // an address: unix:/path, unix:@name, tcp:host:port, zmq:tcp://host:port, zmq:ipc:///path; one of the two
  std::size_t envs = 1, threads = 0;
  std::size_t sessions = 2;     // of `serve` with --connect: one to train with, one to evaluate with; envs are made when they are used
  std::size_t retry = 60;       // seconds that a trainer is looked for, at first and when the link is lost
  bool launched = false;        // by the trainer: it is not looked for, and the process ends with it
  std::string server_key;       // the trainer's public CURVE key
  Identity who;

  /// From `--connect`, `--listen`, `--envs`, `--threads`, `--sessions`, `--retry`, `--key`, `--realtime`, and where these are missing from RAYNFORCE_CONNECT,
  /// RAYNFORCE_ENVS, RAYNFORCE_THREADS, RAYNFORCE_KEY, RAYNFORCE_LAUNCH, RAYNFORCE_TOKEN, RAYNFORCE_HOST, which `raynforce train` sets. Without
  /// a key the token is that of `~/.raynforce/token`, which a trainer of the same user writes.
  static Options parse(int argc, char** argv);
};

namespace detail {

/// Connected to a trainer, or for ZMQ about to be.
inline std::unique_ptr<Wire> connect(const Options& options) {
  if (options.connect.rfind("zmq:", 0) != 0) return std::make_unique<SocketWire>(Address(options.connect).connect());
  return std::make_unique<ZmqWire>(options.connect.substr(4), false, options.server_key);
}

inline std::unique_ptr<Wire> accept(const Options& options) {
  if (options.listen.rfind("zmq:", 0) == 0) return std::make_unique<ZmqWire>(options.listen.substr(4), true, options.server_key);
  const Socket listener = Address(options.listen).listen();
  Socket socket(::accept(listener.fd(), nullptr, nullptr));
  if (socket.fd() < 0) throw Error(why("cannot accept a connection"));
  return std::make_unique<SocketWire>(std::move(socket));
}

inline Identity identity(Identity who, const Wire& wire) {
  who.shares_memory = wire.shares_memory();
  return who;
}

}  // namespace detail

/// A simulator whose loop is the engine's: `poll` for what is asked, write observations, `submit`. One thread may poll, any may submit.
class Server {
 public:
  Server(Spaces spaces, const Options& options, std::unique_ptr<detail::Wire> wire)
      : options_(options), wire_(std::move(wire)), session_(std::move(spaces), options.envs, detail::identity(options.who, *wire_), detail::now_ms()) {
    session_.resumable = !options.launched && !options.connect.empty() && options.retry > 0;
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw Error(detail::why("cannot make a pipe"));
    bell_ = detail::Socket(ends[0]), ring_ = detail::Socket(ends[1]);
    progress_ = detail::now_ms();
    pulse_ = std::thread([this] { pulse(); });
  }
  Server(Spaces spaces, const Options& options)
      : Server(std::move(spaces), options, options.connect.empty() ? detail::accept(options) : detail::connect(options)) {}
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server() {
    {
      const std::lock_guard lock(mutex_);
      session_.close("the simulator is done");
      write();
      stopping_ = true;
    }
    wake_.notify_all();
    pulse_.join();
  }

  /// Whether there is still a trainer; else `ended` says why not.
  bool running() {
    const std::lock_guard lock(mutex_);
    return !session_.over();
  }
  Ended ended() {
    const std::lock_guard lock(mutex_);
    return session_.ended();
  }
  std::size_t envs() const { return session_.envs(); }
  bool times() const { return session_.times(); }
  Json config(std::size_t env) {
    const std::lock_guard lock(mutex_);
    return session_.config(env);
  }
  /// Where an env's observation goes, between a request for it and its `submit`.
  Obs obs(std::size_t env) const { return session_.obs(env); }

  /// What is asked; waits up to `timeout_ms` (-1: without limit) for something. Results so far are sent before it waits.
  const std::vector<Request>& poll(int timeout_ms = -1) {
    const std::int64_t until = timeout_ms < 0 ? std::numeric_limits<std::int64_t>::max() : detail::now_ms() + timeout_ms;
    taken_.clear();
    std::unique_lock lock(mutex_);
    while (true) {
      const std::int64_t now = detail::now_ms();
      progress_ = now;
      if (session_.requests.empty() || now - read_ >= 2) {
        session_.flush();
        flushed_ = read_ = now;
        write();
        read(now);
      }
      tend(now);
      if (!session_.requests.empty() || session_.over() || now >= until) {
        taken_.swap(session_.requests);
        return taken_;
      }
      lock.unlock();
      wait(static_cast<int>(std::min<std::int64_t>(until - now, 200)));
      lock.lock();
    }
  }

  /// An env has done what it was asked. If its episode has ended, the next request for it is a reset.
  void submit(std::size_t env, const Step& step = {}, float seconds = 0) {
    const std::lock_guard lock(mutex_);
    if (!session_.over()) session_.submit(env, step, seconds);
  }
  /// The state of an env that was asked to `save`: any bytes that `load` understands. The random stream of its episodes is saved beside.
  void submit_state(std::size_t env, const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    if (!session_.over()) session_.submit_state(env, bytes);
  }
  /// An env has failed: its episode is cut, and the next request for it is a reset.
  void broken(std::size_t env, const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (!session_.over()) session_.broken(env, text);
  }
  /// Send what was submitted; `poll` does so as well.
  void flush() {
    const std::lock_guard lock(mutex_);
    session_.flush();
    write();
  }
  /// The same if something has waited for more than a millisecond: for loops that step one env after another.
  void flush_if_late() {
    const std::int64_t now = detail::now_ms();
    const std::lock_guard lock(mutex_);
    if (now - flushed_ < 2) return;
    flushed_ = progress_ = now;
    session_.flush();
    write();
  }
  /// From another thread: `poll` looks again now.
  void ring() {
    const char byte = 0;
    [[maybe_unused]] const auto written = ::write(ring_.fd(), &byte, 1);  // a full pipe rings as well
  }
  /// A line for the trainer's log: level is debug, info, warning or error.
  void log(const std::string& level, const std::string& text) {
    const std::lock_guard lock(mutex_);
    session_.log(level, text);
    write();
  }

  /// For `serve`: the process ends when the trainer is gone, even if an env does not return.
  bool exit_when_lost = false;

 private:
  /// Time passes: who is silent, and whether a link that is lost can be had again.
  void tend(std::int64_t now) {
    session_.tick(now);
    if (session_.open() && !session_.down()) {
      lost_at_ = 0;
      return;
    }
    if (options_.who.waits && !told_ && !session_.over() && now - began_ > 5000) {
      told_ = true;
      const bool keyed = !options_.server_key.empty();
      std::fprintf(stderr, "%s: waiting for the trainer at %s to want it%s\n", options_.who.name.c_str(),
                   (options_.connect.empty() ? options_.listen : options_.connect).c_str(), keyed ? "; if it does not, the key may be another's" : "");
    }
    if (session_.over() || !(session_.down() || session_.resuming())) return;
    const std::int64_t patience = static_cast<std::int64_t>(options_.retry) * 1000;
    if (lost_at_ == 0) {
      lost_at_ = now, again_at_ = now;
      std::fprintf(stderr, "%s: the link to the trainer is lost; trying again for %zu s\n", options_.who.name.c_str(), options_.retry);
    }
    if (now - lost_at_ > patience) {
      session_.resumable = false;
      return session_.lost("the trainer was not found again within " + std::to_string(options_.retry) + " s");
    }
    if (!session_.down() || now < again_at_) return;
    again_at_ = now + 200;
    try {
      wire_ = detail::connect(options_);
      session_.again(now);
      sent_ = 0;
      write();
    } catch (const Error&) {}  // not yet
  }

  void wait(int milliseconds) {
    bool full;
    int fd;
    {
      const std::lock_guard lock(mutex_);
      if (wire_->ready()) return;
      full = !session_.out.empty();
      fd = session_.down() ? -1 : wire_->fd();
      if (session_.down()) milliseconds = std::min(milliseconds, 50);
    }
    pollfd watched[2] = {{fd, static_cast<short>(POLLIN | (full ? POLLOUT : 0)), 0}, {bell_.fd(), POLLIN, 0}};
    ::poll(watched, 2, milliseconds);
    char bytes[64];
    if ((watched[1].revents & POLLIN) != 0)
      while (::read(bell_.fd(), bytes, sizeof bytes) == sizeof bytes) {}
  }

  void read(std::int64_t now) {
    while (!session_.over() && !session_.down()) {
      int passed = -1;
      const auto bytes = wire_->receive(buffer_.data(), buffer_.size(), session_.open() ? nullptr : &passed);
      if (passed >= 0) session_.take_memory(passed);
      if (bytes > 0) {
        session_.feed(buffer_.data(), static_cast<std::size_t>(bytes), now, now - progress_);
        write();
        if (static_cast<std::size_t>(bytes) < buffer_.size() && !wire_->ready()) return;
      } else if (bytes == 0) {
        session_.lost("the trainer has closed the connection");
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      } else if (errno != EINTR) {
        session_.lost(detail::why("the connection is lost"));
      }
    }
  }

  void write() {
    if (session_.down()) return;
    while (sent_ < session_.out.size()) {
      const auto bytes = wire_->send(session_.out.data() + sent_, session_.out.size() - sent_);
      if (bytes > 0) {
        sent_ += static_cast<std::size_t>(bytes);
      } else if (errno == EINTR) {
        continue;
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        break;
      } else {
        session_.lost(detail::why("the connection is lost"));
        session_.out.clear();
        sent_ = 0;
        return;
      }
    }
    if (2 * sent_ < session_.out.size()) return;  // the rest of a long message is not moved each time
    session_.out.erase(session_.out.begin(), session_.out.begin() + static_cast<std::ptrdiff_t>(sent_));
    sent_ = 0;
  }

  /// Answers PING, and notices that the trainer is gone, while the loop is busy elsewhere.
  void pulse() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      wake_.wait_for(lock, std::chrono::milliseconds(250));
      const std::int64_t now = detail::now_ms();
      if (stopping_ || now - progress_ < 250) continue;
      read(now);
      tend(now);
      write();
      if (exit_when_lost && session_.over() && now - progress_ > 5000) {
        std::fprintf(stderr, "%s\n", session_.ended().text.c_str());
        ::_exit(1);
      }
    }
  }

  Options options_;
  std::unique_ptr<detail::Wire> wire_;
  detail::Socket bell_, ring_;
  std::mutex mutex_;
  detail::HostSession session_;
  std::vector<Request> taken_;
  std::vector<std::uint8_t> buffer_ = std::vector<std::uint8_t>(1 << 18);
  std::int64_t progress_ = 0, flushed_ = 0, read_ = 0, lost_at_ = 0, again_at_ = 0;
  std::size_t sent_ = 0;  // of `session_.out`
  const std::int64_t began_ = detail::now_ms();
  bool told_ = false;  // that it waits
  bool stopping_ = false;
  std::condition_variable wake_;
  std::thread pulse_;
};

inline Options Options::parse(int argc, char** argv) {
  Options options;
  const auto given = [](const char* name) {
    const char* found = std::getenv(name);
    return std::string(found == nullptr ? "" : found);
  };
  const auto count = [](const std::string& name, const std::string& text, long least, long most = 65536) {
    char* end = nullptr;
    const long found = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || found < least || found > most)
      throw Error(name + " = " + text + " must be a number from " + std::to_string(least) + " to " + std::to_string(most));
    return static_cast<std::size_t>(found);
  };
  options.connect = given("RAYNFORCE_CONNECT");
  options.who.launch = given("RAYNFORCE_LAUNCH"), options.who.token = detail::unhex(given("RAYNFORCE_TOKEN"));
  options.launched = !options.who.launch.empty();
  std::string key = given("RAYNFORCE_KEY");
  if (const std::string text = given("RAYNFORCE_HOST"); !text.empty()) options.who.host = static_cast<int>(count("RAYNFORCE_HOST", text, 0, std::numeric_limits<int>::max()));
  if (const std::string text = given("RAYNFORCE_ENVS"); !text.empty()) options.envs = count("RAYNFORCE_ENVS", text, 1);
  if (const std::string text = given("RAYNFORCE_THREADS"); !text.empty()) options.threads = count("RAYNFORCE_THREADS", text, 0);
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--realtime") {
      options.who.realtime = true;
      continue;
    }
    static const std::vector<std::string> known{"--connect", "--listen", "--envs", "--threads", "--sessions", "--retry", "--key"};
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw Error("unknown argument " + name + "; known are --connect, --listen, --envs, --threads, --sessions, --retry, --key, --realtime");
    if (i + 1 == argc) throw Error(name + " needs a value");
    const std::string value = argv[++i];
    if (name == "--connect") options.connect = value, options.listen.clear();
    if (name == "--listen") options.listen = value, options.connect.clear();
    if (name == "--envs") options.envs = count(name, value, 1);
    if (name == "--threads") options.threads = count(name, value, 0);
    if (name == "--sessions") options.sessions = count(name, value, 1, 64);
    if (name == "--retry") options.retry = count(name, value, 0, 1000000);
    if (name == "--key") key = value;
  }
  if (options.connect.empty() && options.listen.empty())
    throw Error("no trainer to connect to: start this by `raynforce train ppo " + std::string(argc > 0 ? argv[0] : "./simulator") + "`, or give --connect or --listen ADDRESS");
  if (argc > 0) {
    const std::string path = argv[0];
    options.who.name = path.substr(path.rfind('/') + 1);
  }
  if (options.launched) return options;
  options.who.launch = "sims", options.who.waits = true;
  if (!key.empty()) {
    const Json found = Json::parse(detail::read_file(key));
    options.who.token = detail::unhex(found["token"].text()), options.server_key = found["public"].text();
    if (options.who.token.empty()) throw Error(key + " is no key of `raynforce sim keys`");
  } else if (options.who.token.empty()) {
    try {
      std::string text = detail::read_file(given("HOME") + "/.raynforce/token");
      text.erase(text.find_last_not_of(" \n") + 1);
      options.who.token = detail::unhex(text);
    } catch (const Error&) {}  // the trainer will say what is missing
  }
  const std::string& where = options.connect.empty() ? options.listen : options.connect;
  if (where.rfind("zmq:tcp://", 0) == 0 && !detail::is_local(where.substr(10)) && options.server_key.empty())
    throw Error("address " + where + " reaches beyond this machine and needs a key: give --key simulator.key, made by `raynforce sim keys`");
  if (where.rfind("zmq:", 0) != 0) static_cast<void>(detail::Address(where));  // refuses what is none
  if (where.rfind("zmq:", 0) != 0 || where.rfind("zmq:ipc:", 0) == 0) options.server_key.clear();
  return options;
}

// -- simulators whose loop is ours --------------------------------------------------------------------------------------

namespace detail {

/// Whether a class has `std::string save() const` and `void load(const std::string& state, Obs obs)`.
template <class Env, class = void>
inline constexpr bool saves = false;
template <class Env>
inline constexpr bool saves<Env, std::void_t<decltype(std::string(std::declval<const Env&>().save())),
                                             decltype(std::declval<Env&>().load(std::declval<const std::string&>(), std::declval<Obs>()))>> = true;

/// What a class of several agents says beside them, if it does.
template <class Env, class = void>
inline constexpr bool has_agents = false;
template <class Env>
inline constexpr bool has_agents<Env, std::void_t<decltype(std::vector<Agent>(Env::agents()))>> = true;
template <class Env, class = void>
inline constexpr bool in_turns = false;
template <class Env>
inline constexpr bool in_turns<Env, std::void_t<std::integral_constant<bool, Env::turns>>> = Env::turns;
template <class Env, class = void>
inline constexpr std::size_t global_state = 0;
template <class Env>
inline constexpr std::size_t global_state<Env, std::void_t<std::integral_constant<std::size_t, Env::state>>> = Env::state;
template <class Env, class = void>
inline constexpr bool saves_agents = false;
template <class Env>
inline constexpr bool saves_agents<Env, std::void_t<decltype(std::string(std::declval<const Env&>().save())),
                                                    decltype(std::declval<Env&>().load(std::declval<const std::string&>()))>> = true;

/// An env of several agents as one env.
template <class Env>
class OfAgents {
 public:
  static const Cast& cast() {
    static const Cast made(Env::agents(), in_turns<Env>, global_state<Env>);
    return made;
  }
  static Spaces spaces() { return cast().spaces; }

  OfAgents() = default;
  template <class Config, std::enable_if_t<std::is_same_v<Config, Json> && std::is_constructible_v<Env, const Config&>, int> = 0>
  explicit OfAgents(const Config& config) : env_(config) {}

  void reset(std::uint64_t seed, Obs obs) {
    agents_.begin();
    env_.reset(seed, agents_);
    agents_.show(obs);
  }
  Step step(Action action, Obs obs) {
    agents_.take(action);
    env_.step(agents_);
    return agents_.show(obs);
  }
  template <class E = Env, std::enable_if_t<saves_agents<E>, int> = 0>
  std::string save() const {
    return agents_.saved() + env_.save();
  }
  template <class E = Env, std::enable_if_t<saves_agents<E>, int> = 0>
  void load(const std::string& state, Obs obs) {
    env_.load(state.substr(agents_.load(state, obs)));
  }

 private:
  Env env_;
  Agents agents_{cast()};
};

/// The envs of a simulator, made when they are first reset.
template <class Env>
class Envs {
 public:
  explicit Envs(Server& server) : server_(server), envs_(server.envs()) {}

  void run(const Request& request) {
    const auto began = std::chrono::steady_clock::now();
    Step step;
    try {
      std::unique_ptr<Env>& env = envs_[request.env];
      if (env == nullptr) env = make(request.env);
      if constexpr (saves<Env>) {
        if (request.kind == Request::Kind::save) return server_.submit_state(request.env, env->save());
        if (request.kind == Request::Kind::load) {
          env->load(request.state, server_.obs(request.env));
          return server_.submit(request.env);
        }
      }
      if (request.kind == Request::Kind::reset)
        env->reset(request.seed, server_.obs(request.env));
      else
        step = env->step(request.action, server_.obs(request.env));
    } catch (const std::exception& error) {
      envs_[request.env] = nullptr;
      return server_.broken(request.env, error.what());
    } catch (...) {
      envs_[request.env] = nullptr;
      return server_.broken(request.env, "it threw what is no std::exception");
    }
    const std::chrono::duration<float> took = std::chrono::steady_clock::now() - began;
    server_.submit(request.env, step, took.count());
  }

 private:
  std::unique_ptr<Env> make(std::size_t env) {
    if constexpr (std::is_constructible_v<Env, const Json&>)
      return std::make_unique<Env>(server_.config(env));
    else
      return std::make_unique<Env>();
  }

  Server& server_;
  std::vector<std::unique_ptr<Env>> envs_;
};

/// Threads that run requests in the order of their arrival.
class Workers {
 public:
  Workers(std::size_t threads, std::function<void(const Request&)> run) : run_(std::move(run)) {
    for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Workers() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void add(const std::vector<Request>& requests) {
    {
      const std::lock_guard lock(mutex_);
      queue_.insert(queue_.end(), requests.begin(), requests.end());
    }
    requests.size() == 1 ? wake_.notify_one() : wake_.notify_all();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      const Request request = queue_.front();
      queue_.pop_front();
      lock.unlock();
      run_(request);
      lock.lock();
    }
  }

  std::function<void(const Request&)> run_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Request> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

/// Serves one session to its end.
template <class Env>
Ended serve_one(const Spaces& spaces, Options options, std::unique_ptr<Wire> wire) {
  options.who.saves = saves<Env>;
  Server server(spaces, options, std::move(wire));
  server.exit_when_lost = options.launched;
  Envs<Env> envs(server);
  if (options.threads == 0) {
    while (server.running())
      for (const Request& request : server.poll()) {
        envs.run(request);
        server.flush_if_late();
      }
  } else {
    Workers workers(options.threads, [&](const Request& request) {
      envs.run(request);
      server.ring();
    });
    while (server.running()) workers.add(server.poll());
  }
  return server.ended();
}

/// The exit code of a simulator whose last session ended so.
inline int exit_code(const Options& options, const Ended& ended) {
  if (ended.code == "closed" || ended.code == "over") return 0;
  std::fprintf(stderr, "%s: %s\n", options.who.name.c_str(), ended.text.c_str());
  return ended.code == "refused" ? 78 : 1;  // EX_CONFIG: trying again cannot help
}

/// A trainer that is about to listen is waited for.
inline std::unique_ptr<Wire> connect_patiently(const Options& options, std::int64_t milliseconds) {
  bool told = false;
  for (const std::int64_t began = now_ms();;) {
    try {
      return connect(options);
    } catch (const Error&) {
      if (now_ms() - began >= milliseconds || options.launched) throw;
    }
    if (!told && now_ms() - began > 2000) {
      told = true;
      std::fprintf(stderr, "%s: waiting for a trainer at %s\n", options.who.name.c_str(), options.connect.c_str());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

/// One session after another, until the trainer is done; the exit code.
template <class Env>
int serve_all(const Spaces& spaces, const Options& options) {
  std::int64_t patience = static_cast<std::int64_t>(options.retry) * 1000;
  bool served = false;
  for (int broken = 0; broken < 8;) {
    std::unique_ptr<Wire> wire;
    try {
      wire = connect_patiently(options, patience);
    } catch (const Error&) {
      if (served) return 0;  // it has closed a session, and is gone
      throw;
    }
    const std::int64_t began = now_ms();
    const Ended ended = serve_one<Env>(spaces, options, std::move(wire));
    if (ended.code == "closed") {
      broken = 0, patience = 0, served = true;
    } else if (ended.code == "replaced" || ended.code == "dropped" || ended.code == "violation") {
      broken = now_ms() - began > 10000 ? 1 : broken + 1;
    } else {
      return exit_code(options, ended);
    }
  }
  return 1;
}

/// Envs of a class, in all the ways that the options name.
template <class Env>
int serve_envs(const Options& options) {
  const Spaces spaces = Env::spaces();
  if (options.launched) return exit_code(options, serve_one<Env>(spaces, options, connect_patiently(options, 0)));
  if (options.listen.empty()) {
    std::vector<int> codes(options.sessions, 0);
    std::vector<std::thread> others;
    const auto run = [&](std::size_t i) {
      try {
        codes[i] = serve_all<Env>(spaces, options);
      } catch (const Error& error) {
        if (i == 0) std::fprintf(stderr, "%s: %s\n", options.who.name.c_str(), error.what());
        codes[i] = 1;
      }
    };
    for (std::size_t i = 1; i < options.sessions; ++i) others.emplace_back(run, i);
    run(0);
    for (std::thread& other : others) other.join();
    return *std::max_element(codes.begin(), codes.end());
  }
  std::fprintf(stderr, "%s: listening on %s\n", options.who.name.c_str(), options.listen.c_str());
  if (options.listen.rfind("zmq:", 0) == 0) {
    std::unique_ptr<Wire> wire = accept(options);
    while (true) {
      serve_one<Env>(spaces, options, std::move(wire));
      for (wire = nullptr; wire == nullptr;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // ZMQ lets go of an address after a while
        try {
          wire = accept(options);
        } catch (const Error&) {}
      }
    }
  }
  const Socket listener = Address(options.listen).listen();
  while (true) {
    Socket socket(::accept(listener.fd(), nullptr, nullptr));
    if (socket.fd() >= 0) serve_one<Env>(spaces, options, std::make_unique<SocketWire>(std::move(socket)));
  }
}

}  // namespace detail

/// Serve envs of the class `Env`, which has `static Spaces spaces()`, `reset(std::uint64_t seed, Obs)`, `Step step(Action, Obs)`, and a
/// constructor that takes nothing or the settings (`const Json&`). With `std::string save() const` and `void load(const std::string& state,
/// Obs)` its episodes come back exactly after a resume; `load` may be called on a new object. Returns the exit code of `main`.
///
/// A class of several agents has `static std::vector<Agent> agents()` in place of `spaces`, `reset(std::uint64_t seed, Agents&)`,
/// `step(Agents&)` and, for exact resumes, `save` and `void load(const std::string& state)`; what agents see is saved beside. If they move
/// in turns, `static constexpr bool turns = true`; with a global state, `static constexpr std::size_t state` is how many numbers it has.
template <class Env>
int serve(const Options& options) {
  if constexpr (detail::has_agents<Env>) return serve<detail::OfAgents<Env>>(options);
  else return detail::serve_envs<Env>(options);
}

template <class Env>
int serve(int argc, char** argv) {
  try {
    return serve<Env>(Options::parse(argc, argv));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

// -- a served policy ----------------------------------------------------------------------------------------------------

/// The server refused a request; `status` is the HTTP code.
struct Refused : Error {
  Refused(int code, const std::string& why) : Error(why + " (HTTP " + std::to_string(code) + ")"), status(code) {}
  int status;
};

/// A policy that `raynforce serve` serves, asked over HTTP/1.1. Keeps its connection, and opens it again if lost. Not for several threads at once.
///
///     raynforce::Client client("http://127.0.0.1:8000", token);
///     std::int64_t choice = client.choice({0.0, 0.1, 0.0, -0.1});
class Client {
 public:
  Client(const std::string& url, std::string token, int timeout_seconds = 30) : url_(url), token_(std::move(token)), seconds_(timeout_seconds) {
    if (url.rfind("http://", 0) != 0) throw Error(url + " is not the URL of a server: give http://HOST:PORT");
    if (token_.find_first_of("\r\n") != std::string::npos) throw Error("the token has a line break");
    std::string place = url.substr(7, url.find('/', 7) - 7);
    const std::size_t colon = place.rfind(':');
    const bool has_port = colon != std::string::npos && place.find(']', colon) == std::string::npos;
    port_ = has_port ? place.substr(colon + 1) : "80";
    host_ = has_port ? place.substr(0, colon) : place;
    if (host_.empty()) throw Error(url + " is not the URL of a server: give http://HOST:PORT");
    name_ = place;
    if (host_.front() == '[' && host_.back() == ']') host_ = host_.substr(1, host_.size() - 2);
  }

  /// The action for one observation, or for a batch of them: arrays are lists, a `Dict` space is an object.
  Json act(const Json& obs) { return ask({{"obs", obs}})["action"]; }
  Json act(const Json& obs, bool greedy) { return ask({{"obs", obs}, {"greedy", greedy}})["action"]; }
  /// The numbers of the action for one observation of numbers.
  std::vector<double> act(const std::vector<double>& obs) {
    std::vector<double> numbers;
    flatten(act(Json(std::vector<Json>(obs.begin(), obs.end()))), numbers);
    return numbers;
  }
  /// The one choice of a discrete action.
  std::int64_t choice(const std::vector<double>& obs) { return static_cast<std::int64_t>(act(obs).at(0)); }
  /// Spaces, policies, limits.
  Json info() { return Json::parse(request("GET", "/info", "")); }

 private:
  struct Lost {
    std::string why;
  };

  Json ask(std::vector<std::pair<std::string, Json>> fields) {
    return Json::parse(request("POST", "/act", Json::object(std::move(fields)).dump()));
  }

  static void flatten(const Json& json, std::vector<double>& numbers) {
    if (json.type() != Json::Type::list) {
      numbers.push_back(json.number());
      return;
    }
    for (const Json& item : json.items()) flatten(item, numbers);
  }

  std::string request(const std::string& method, const std::string& path, const std::string& body) {
    std::string text = method + " " + path + " HTTP/1.1\r\nHost: " + name_ + "\r\nAuthorization: Bearer " + token_ + "\r\n";
    if (!body.empty()) text += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
    text += "\r\n" + body;
    for (const int pause : {0, 50, 200, 500, -1}) {  // milliseconds before the next attempt
      try {
        if (socket_.fd() < 0) connect();
        send(text);
        return receive();
      } catch (const Lost& lost) {
        socket_ = detail::Socket();
        if (pause < 0) throw Error("the server at " + url_ + " cannot be reached: " + lost.why);
        std::this_thread::sleep_for(std::chrono::milliseconds(pause));
      }
    }
    return {};
  }

  void connect() {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int code = ::getaddrinfo(host_.c_str(), port_.c_str(), &hints, &found); code != 0)
      throw Error("the server at " + url_ + " cannot be found: " + ::gai_strerror(code));
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, ::freeaddrinfo);
    const timeval limit{seconds_, 0};
    const int on = 1;
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
      detail::Socket socket(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol));
      if (socket.fd() < 0) continue;
      ::setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
      ::setsockopt(socket.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
      ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      if (::connect(socket.fd(), one->ai_addr, one->ai_addrlen) == 0) {
        socket_ = std::move(socket);
        return;
      }
    }
    throw Lost{std::strerror(errno)};
  }

  void send(const std::string& text) {
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t sent = ::send(socket_.fd(), text.data() + at, text.size() - at, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) throw Lost{std::strerror(errno)};
      at += static_cast<std::size_t>(sent);
    }
  }

  /// More bytes of the answer; false at its end.
  bool more(std::string& text) {
    char buffer[16384];
    ssize_t got;
    do got = ::recv(socket_.fd(), buffer, sizeof buffer, 0);
    while (got < 0 && errno == EINTR);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      socket_ = detail::Socket();
      throw Error("the server at " + url_ + " did not answer within " + std::to_string(seconds_) + " seconds");
    }
    if (got < 0) throw Lost{std::strerror(errno)};
    text.append(buffer, static_cast<std::size_t>(got));
    if (text.size() > largest) throw Error("the server at " + url_ + " sends more than an answer");
    return got > 0;
  }

  std::string receive() {
    std::string text;
    std::size_t end;
    while ((end = text.find("\r\n\r\n")) == std::string::npos)
      if (!more(text)) throw Lost{"it hung up"};
    std::string head = text.substr(0, end + 2);
    std::transform(head.begin(), head.end(), head.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    const int status = head.rfind("http/1.1 ", 0) == 0 ? std::atoi(head.c_str() + 9) : 0;
    const std::size_t at = head.find("\r\ncontent-length:");
    if (status < 200 || at == std::string::npos) throw Error("what listens at " + url_ + " does not answer as raynforce serve does");
    const std::size_t length = std::strtoul(head.c_str() + at + 17, nullptr, 10);
    std::string body = text.substr(end + 4);
    while (body.size() < length)
      if (!more(body)) throw Lost{"it hung up"};
    if (head.find("\r\nconnection: close") != std::string::npos) socket_ = detail::Socket();
    if (status == 200) return body;
    std::string why;
    try {
      why = Json::parse(body)["error"].text();
    } catch (const Error&) {}
    throw Refused(status, why.empty() ? "the server refused the request" : why);
  }

  static constexpr std::size_t largest = std::size_t{1} << 30;
  std::string url_, token_, host_, port_, name_;
  int seconds_;
  detail::Socket socket_;
};

}  // namespace raynforce
