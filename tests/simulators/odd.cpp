// A simulator that does as its settings say: a camera, a gear, a steering wheel, and faults.
#include <chrono>
#include <csignal>
#include <thread>

#include "raynforce.hpp"

struct Odd {
  static raynforce::Spaces spaces() {
    return {{raynforce::box<std::uint8_t>({4, 4, 3}).named("camera"), raynforce::discrete(6, -1).named("gear"), raynforce::box({2}).named("speed")},
            raynforce::box({2}, -1, 1)};
  }

  explicit Odd(const raynforce::Json& config)
      : fault(config["fault"].text()), at(static_cast<int>(config["at"].number(5))), length(static_cast<int>(config["length"].number(10))) {}

  void reset(std::uint64_t seed_, raynforce::Obs obs) {
    seed = seed_, step_ = 0;
    write(obs);
  }

  raynforce::Step step(raynforce::Action action, raynforce::Obs obs) {
    ++step_;
    wheel = action[0] + action[1];
    if (step_ == at && fault == "throw") throw std::runtime_error("motor jammed");
    if (step_ == at && fault == "exit") std::fprintf(stderr, "out of fuel\n"), std::exit(7);
    if (step_ == at && fault == "abort") std::raise(SIGSEGV);
    if (step_ == at && fault == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
    if (fault == "leak") leaked.resize(leaked.size() + (1 << 20), 'x');
    if (step_ == at && fault == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(300));
    write(obs);
    if (step_ == at && fault == "nan") obs.data<float>(2)[0] = NAN;
    if (step_ == at && fault == "range") obs.data<std::int64_t>(1)[0] = 77;
    const bool over = step_ >= length;
    raynforce::Step result{static_cast<double>(wheel), over && seed % 2 == 0, over && seed % 2 == 1};
    if (over) result.info = {{"laps", 2.5}, {"is_success", 1}};
    return result;
  }

#ifdef SAVES
  std::string save() const {
    if (step_ == at && fault == "save") throw std::runtime_error("no disk");
    if (step_ == at && fault == "exit in save") std::exit(9);
    if (step_ == at && fault == "huge") return std::string(65 << 20, 'x');
    std::string state = raynforce::pack(seed, step_, wheel);
    if (fault == "big") state.resize(40 << 20, 'x');
    return state;
  }

  void load(const std::string& state, raynforce::Obs obs) {
    if (fault == "load") throw std::runtime_error("cannot go back");
    if (fault == "exit in load") std::exit(9);
    raynforce::unpack(fault == "big" ? state.substr(0, sizeof seed + sizeof step_ + sizeof wheel) : state, seed, step_, wheel);
    if (fault == "forget") ++step_;
    write(obs);
  }
#endif

  void write(raynforce::Obs obs) const {
    for (int i = 0; i < 48; ++i) obs.data<std::uint8_t>(0)[i] = static_cast<std::uint8_t>(seed + static_cast<std::uint64_t>(i + step_));
    obs.data<std::int64_t>(1)[0] = step_ % 6 - 1;
    obs.data<float>(2)[0] = static_cast<float>(step_), obs.data<float>(2)[1] = wheel;
  }

  std::string fault, leaked;
  int at, length, step_ = 0;
  float wheel = 0;
  std::uint64_t seed = 0;
};

int main(int argc, char** argv) { return raynforce::serve<Odd>(argc, argv); }
