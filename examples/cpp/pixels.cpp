// A ball falls and bounces off the walls, a net catches it: 1 for a catch, -1 for a miss. An observation is the last 4 frames, 84x84
// bytes each, or of the size that is given: raynforce train dqn "./pixels --size 20"
#include <algorithm>
#include <cstring>
#include <random>

#include "raynforce.hpp"

struct Pixels {
  static constexpr int frames = 4, across = 10, half_net = 1;  // the field is at least 10 cells wide
  static inline int size = 84;                                 // pixels of a side

  static raynforce::Spaces spaces() {
    const auto side = static_cast<std::size_t>(size);
    raynforce::Leaf image = raynforce::box<std::uint8_t>({frames, side, side});
    image.stack = frames;
    return {{image}, raynforce::discrete(3)};  // left, stay, right
  }

  explicit Pixels(const raynforce::Json& config) : balls(static_cast<int>(config["balls"].number(1))) {}

  void reset(std::uint64_t seed, raynforce::Obs obs) {
    random.seed(seed);
    net = cells / 2, left = balls;
    drop();
    const std::size_t frame = draw(0);
    for (std::size_t i = 1; i < frames; ++i) std::memcpy(&seen[i * frame], &seen[0], frame);
    std::memcpy(obs.data<std::uint8_t>(), seen.data(), seen.size());
  }

  raynforce::Step step(raynforce::Action action, raynforce::Obs obs) {
    net = std::clamp(net + static_cast<int>(action.choice()) - 1, half_net, cells - 1 - half_net);
    if (x + drift < 0 || x + drift >= cells) drift = -drift;
    x += drift, ++y;
    const bool down = y == cells - 1, caught = down && std::abs(x - net) <= half_net;
    const bool over = down && --left == 0;
    const std::size_t frame = seen.size() / frames;
    std::memmove(&seen[0], &seen[frame], seen.size() - frame);
    draw(frames - 1);
    std::memcpy(obs.data<std::uint8_t>(), seen.data(), seen.size());
    if (down && !over) drop();
    return {caught ? 1.0 : down ? -1.0 : 0.0, over, false};
  }

  void drop() {
    x = std::uniform_int_distribution(0, cells - 1)(random), y = 0;
    drift = std::uniform_int_distribution(-1, 1)(random);
  }

  /// Draws the newest frame in the place of number `i`; its bytes.
  std::size_t draw(std::size_t i) {
    const std::size_t frame = seen.size() / frames;
    std::memset(&seen[i * frame], 0, frame);
    const auto fill = [&](int column, int row, int width) {
      for (int line = row * cell; line < (row + 1) * cell; ++line)
        std::memset(&seen[i * frame + static_cast<std::size_t>(line * size + column * cell)], 255, static_cast<std::size_t>(width * cell));
    };
    fill(x, y, 1), fill(net - half_net, cells - 1, 2 * half_net + 1);
    return frame;
  }

  int cell = size / across, cells = size / cell;
  int balls, left = 0, x = 0, y = 0, drift = 0, net = 0;
  std::mt19937_64 random;
  std::vector<std::uint8_t> seen = std::vector<std::uint8_t>(static_cast<std::size_t>(frames * size * size));
};

int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "--size") {
    Pixels::size = std::atoi(argv[2]);
    if (Pixels::size < Pixels::across || Pixels::size > 1024) return std::fprintf(stderr, "--size %s must be a number from 10 to 1024\n", argv[2]), 2;
    argv[2] = argv[0], argc -= 2, argv += 2;
  }
  return raynforce::serve<Pixels>(argc, argv);
}
