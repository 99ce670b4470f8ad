// Feeds a host's session with messages of a trainer that are right, mutated or random, in pieces of any length, so many as are asked for;
// or with those that come on stdin. Sanitizers watch.
#include <limits>
#include <random>

#include "raynforce.hpp"

using raynforce::detail::Header;
using Bytes = std::vector<std::uint8_t>;

static void append(Bytes& to, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const std::uint8_t*>(data);
  to.insert(to.end(), from, from + bytes);
  while (to.size() % 8 != 0) to.push_back(0);
}

static Bytes message(Header header, const std::string& meta, const Bytes& body, int buffers) {
  std::string text = meta;
  text.resize((text.size() + 7) / 8 * 8, ' ');
  header.meta_bytes = static_cast<std::uint32_t>(text.size()), header.body_bytes = body.size(), header.buffers = static_cast<std::uint16_t>(buffers);
  Bytes whole;
  append(whole, &header, sizeof header);
  append(whole, text.data(), text.size());
  append(whole, body.data(), body.size());
  return whole;
}

static raynforce::Spaces world(std::uint32_t number) {
  if (number == 0) return {{raynforce::box({4})}, raynforce::discrete(2)};
  const double none = std::numeric_limits<double>::infinity();
  raynforce::Leaf on = raynforce::box<std::int8_t>({3}), action = raynforce::box({2}, -1, 1);
  on.kind = "multibinary", action.low[1] = -none, action.high[1] = none;
  return {{raynforce::box<std::uint8_t>({6, 6, 3}).named("camera"), raynforce::discrete(5, -1).named("gear"), on.named("on")}, action};
}

static bool read(void* to, std::size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

/// The protocol fuzzer's messages, as they come on stdin: for each session the number of its world, then messages with their lengths, then
/// a length of -1.
static int play() {
  long sessions = 0, welcomed = 0, messages = 0, answered = 0, refused = 0;
  for (std::uint32_t number = 0; read(&number, sizeof number); ++sessions) {
    raynforce::detail::HostSession session(world(number), 4, {}, 0);
    std::int32_t length = 0;
    bool opened = false;
    while (read(&length, sizeof length) && length >= 0) {
      Bytes next(static_cast<std::size_t>(length));
      if (!read(next.data(), next.size())) return 2;
      if (session.over()) continue;
      ++messages;
      for (std::size_t at = 0, piece = 0; at < next.size() && !session.over(); at += piece) {
        piece = std::min<std::size_t>(next.size() - at, messages % 2 == 0 ? 7 : 1 << 16);
        session.feed(next.data() + at, piece, 0, 0);
      }
      opened = opened || session.open();
      while (!session.requests.empty() && !session.over()) {
        std::vector<raynforce::Request> asked;
        asked.swap(session.requests);
        for (const raynforce::Request& request : asked) {
          if (++answered % 20 == 0) session.broken(request.env, "motor jammed");
          else session.submit(request.env, {1.0, answered % 7 == 0, answered % 11 == 0, {{"laps", 2.5}}}, 0.1f);
        }
      }
      session.flush();
      session.out.clear();
    }
    welcomed += opened, refused += session.over();
  }
  std::printf("%ld sessions, %ld welcomed, %ld messages, %ld answered, %ld refused\n", sessions, welcomed, messages, answered, refused);
  return messages == 0 || answered == 0 || refused == 0;
}

static const char* const ACTS =
    R"({"autoreset":"same_step","capabilities":["inference"],"fragment":4,"policy":{"exploration":"policy","values":"q","network":{"normalize":true,
    "inputs":[{"path":"obs/a","encoding":"image","shape":[3,3]},{"path":"obs/b","encoding":"onehot","shape":[],"sizes":[4],"start":[0]}],
    "towers":[{"name":"policy","source":"input","layers":[{"type":"Linear","size":6},{"type":"LayerNorm"},{"type":"Activation","name":"elu"},{"type":"Linear","size":5}]}],
    "free":[]}}})";

int main(int argc, char** argv) {
  if (argc == 1) return play();
  const long rounds = std::atol(argv[1]);
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto below = [&](std::uint64_t n) { return random() % n; };
  long messages = 0, answered = 0, refused = 0, gathered = 0, saves = 0, loaded = 0;
  while (messages < rounds) {
    const raynforce::Spaces spaces{{raynforce::box<std::uint8_t>({3, 3}).named("a"), raynforce::discrete(4).named("b")}, raynforce::multidiscrete({2, 3})};
    raynforce::Identity who;
    const bool acts = below(3) == 0;
    who.realtime = below(4) == 0;
    who.saves = below(8) != 0;
    raynforce::detail::HostSession session(spaces, 3, who, 0);
    std::uint64_t sequence = 0;
    std::string state;  // that an env was saved in
    for (int i = 0; i < 40 && !session.over(); ++i, ++messages) {
      Header header;
      header.session = below(20) == 0 ? below(9) : 7, header.sequence = below(8) == 0 ? below(sequence + 2) : ++sequence;
      Bytes body, next;
      const std::uint64_t kind = i == 0 ? 0 : i == 1 ? 1 : 1 + below(10);
      if (kind == 0) {
        header.type = 2, header.envs = 3;
        const std::uint64_t seeds[3] = {1, 2, 3};
        append(body, seeds, sizeof seeds);
        std::string welcome = ACTS;
        if (below(4) == 0) welcome[below(welcome.size())] = static_cast<char>(' ' + below(90));
        next = message(header, acts ? welcome : below(2) == 0 ? R"({"autoreset":"same_step","capabilities":["episodes","timing","info","snapshot"],"config":{"x":[1,{"y":null}]}})" : R"({"autoreset":"explicit","capabilities":["snapshot"]})", body, 1);
      } else if (acts && i != 1) {
        header.type = static_cast<std::uint8_t>(i == 2 || below(4) == 0 ? 14 : 15);
        if (header.type == 14) {
          std::vector<float> numbers(13 * 6 + 6 + 2 * 6 + 6 * 5 + 5);
          for (float& number : numbers) number = static_cast<float>(below(100)) / 50 - 1;
          append(body, numbers.data(), 4 * numbers.size()), append(body, numbers.data(), 4 * 13), append(body, numbers.data(), 4 * 13);
        }
        next = message(header, header.type == 14 ? R"({"version":3,"schedules":{"epsilon":0.5}})" : R"({"seed":12})", body, header.type == 14 ? 3 : 0);
      } else if (kind <= 5) {
        header.type = kind <= 2 ? 4 : 5, header.envs = i == 1 ? 3 : static_cast<std::uint32_t>(1 + below(3));
        std::vector<std::uint32_t> ids;
        const auto first = static_cast<std::uint32_t>(below(3));
        for (std::uint32_t env = 0; env < header.envs; ++env) ids.push_back((first + env) % 3);
        append(body, ids.data(), 4 * ids.size());
        if (header.type == 5) {
          std::vector<std::int64_t> actions;
          for (std::uint32_t env = 0; env < header.envs; ++env) actions.push_back(static_cast<std::int64_t>(below(2))), actions.push_back(static_cast<std::int64_t>(below(3)));
          append(body, actions.data(), 8 * actions.size());
        }
        next = message(header, "", body, header.type == 5 ? 2 : 1);
      } else if (kind >= 9) {
        header.type = kind == 9 ? 12 : 13, header.envs = static_cast<std::uint32_t>(1 + below(3));
        std::vector<std::uint32_t> ids;
        std::vector<std::uint64_t> sizes;
        std::string states;
        for (std::uint32_t env = 0; env < header.envs; ++env) {
          ids.push_back(env);
          const std::string one = below(4) == 0 ? std::string(below(60), 'x') : state;
          sizes.push_back(below(60) == 0 ? random() : one.size()), states += one;
        }
        append(body, ids.data(), 4 * ids.size());
        if (kind == 10) append(body, sizes.data(), 8 * sizes.size()), append(body, states.data(), states.size());
        next = message(header, "", body, kind == 9 ? 1 : 3);
      } else {
        header.type = static_cast<std::uint8_t>(below(4) == 0 ? below(256) : below(2) == 0 ? 8 : 9);
        next = message(header, below(3) == 0 ? R"({"recoverable":true,"text":"\u00e9\ud83d\ude00"})" : "", {}, 0);
      }
      if (below(30) == 0)
        for (std::uint64_t n = 1 + below(4); n > 0 && !next.empty(); --n) next[below(next.size())] = static_cast<std::uint8_t>(random());
      if (below(100) == 0) next.resize(below(next.size() + 1));
      if (below(150) == 0)
        for (std::uint8_t& byte : next) byte = static_cast<std::uint8_t>(random());
      for (std::size_t at = 0; at < next.size();) {
        const std::size_t piece = std::min<std::size_t>(next.size() - at, 1 + below(100));
        session.feed(next.data() + at, piece, i, 0);
        at += piece;
      }
      for (int turn = 0; turn < 100 && !session.requests.empty() && !session.over(); ++turn) {
        std::vector<raynforce::Request> asked;
        asked.swap(session.requests);
        for (const raynforce::Request& request : asked) {
          for (int cell = 0; cell < 9; ++cell) session.obs(request.env).data<std::uint8_t>(0)[cell] = static_cast<std::uint8_t>(random());
          session.obs(request.env).data<std::int64_t>(1)[0] = 2;
          if (request.kind == raynforce::Request::Kind::load) loaded += request.state == "state of an env";
          if (request.kind == raynforce::Request::Kind::save && below(10) != 0) session.submit_state(request.env, "state of an env"), ++saves;
          else if (below(10) == 0) session.broken(request.env, std::string(below(3) == 0 ? 5000 : 5, '\n'));
          else if (request.kind == raynforce::Request::Kind::save) session.broken(request.env, "cannot be saved");
          else session.submit(request.env, {1.0, below(9) == 0, below(9) == 0, {{"x", 1.0}}}, 0.1f), ++answered;
        }
        if (below(30) == 0) break;  // still at it when the next message comes
      }
      session.flush();
      session.tick(i);
      for (std::size_t at = 0; at + sizeof header <= session.out.size();) {
        std::memcpy(&header, session.out.data() + at, sizeof header);
        if (header.type == 12) {
          const std::size_t before = sizeof header + header.envs * 4 + header.envs % 2 * 4 + header.envs * 8;
          std::uint64_t size;
          std::memcpy(&size, session.out.data() + at + before, 8);
          state.assign(reinterpret_cast<const char*>(session.out.data()) + at + before + 8 * header.envs, static_cast<std::size_t>(size));
        }
        gathered += header.type == 16, at += sizeof header + header.meta_bytes + static_cast<std::size_t>(header.body_bytes);
      }
      session.out.clear();
    }
    refused += session.over();
  }
  std::printf("%ld messages, %ld answered, %ld fragments, %ld saved, %ld loaded, %ld sessions refused\n", messages, answered, gathered, saves, loaded, refused);
  return answered == 0 || refused == 0 || saves == 0 || loaded == 0 || gathered == 0;
}
