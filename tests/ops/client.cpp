// Asks a served policy, for each line of numbers on stdin; prints the numbers of its action, or what went wrong.
#include "raynforce.hpp"

#include <iostream>
#include <sstream>

int main(int argc, char** argv) try {
  if (argc != 3) throw raynforce::Error("usage: client URL TOKEN");
  raynforce::Client client(argv[1], argv[2]);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream numbers(line);
    std::vector<double> obs;
    for (double number; numbers >> number;) obs.push_back(number);
    try {
      for (const double number : client.act(obs)) std::printf("%.9g ", number);
      std::printf("%s\n", client.info()["env"].text().c_str());
    } catch (const raynforce::Refused& refused) {
      std::printf("refused %d %s\n", refused.status, refused.what());
    }
    std::fflush(stdout);
  }
} catch (const raynforce::Error& error) {
  std::printf("%s\n", error.what());
  return 2;
}
