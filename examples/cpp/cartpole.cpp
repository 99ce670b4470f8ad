// CartPole with the physics of gymnasium's CartPole-v1.
#include <cmath>
#include <random>

#include "raynforce.hpp"

struct CartPole {
  static raynforce::Spaces spaces() { return {{raynforce::box({4})}, raynforce::discrete(2)}; }

  explicit CartPole(const raynforce::Json& config) : limit(static_cast<int>(config["limit"].number(500))) {}

  void reset(std::uint64_t seed, raynforce::Obs obs) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> start(-0.05, 0.05);
    x = start(random), speed = start(random), angle = start(random), spin = start(random);
    steps = 0;
    write(obs);
  }

  raynforce::Step step(raynforce::Action action, raynforce::Obs obs) {
    const double force = action.choice() == 1 ? 10.0 : -10.0;
    const double cos = std::cos(angle), sin = std::sin(angle);
    const double push = (force + 0.05 * spin * spin * sin) / 1.1;  // pole: 0.1 kg, half a meter to its middle; cart: 1 kg
    const double angular = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1));
    const double linear = push - 0.05 * angular * cos / 1.1;
    x += 0.02 * speed, speed += 0.02 * linear;
    angle += 0.02 * spin, spin += 0.02 * angular;
    write(obs);
    const bool fell = std::abs(x) > 2.4 || std::abs(angle) > 12 * 2 * M_PI / 360;
    return {1.0, fell, ++steps >= limit};
  }

  std::string save() const { return raynforce::pack(x, speed, angle, spin, steps); }

  void load(const std::string& state, raynforce::Obs obs) {
    raynforce::unpack(state, x, speed, angle, spin, steps);
    write(obs);
  }

  void write(raynforce::Obs obs) const {
    obs[0] = static_cast<float>(x), obs[1] = static_cast<float>(speed);
    obs[2] = static_cast<float>(angle), obs[3] = static_cast<float>(spin);
  }

  double x, speed, angle, spin;
  int steps, limit;
};

int main(int argc, char** argv) { return raynforce::serve<CartPole>(argc, argv); }
