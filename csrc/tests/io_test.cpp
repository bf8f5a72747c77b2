#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "io/checksum.h"
#include "io/engine.h"

using namespace memtune::io;

namespace {

// A file that is gone when the test ends.
struct File {
  char path[32] = "/tmp/memtune-io-XXXXXX";
  int fd = mkstemp(path);
  ~File() {
    close(fd);
    unlink(path);
  }
};

std::vector<unsigned char> numbers(std::size_t bytes) {
  std::vector<unsigned char> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) made[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
  return made;
}

void checksums_are_those_of_the_published_algorithm() {
  std::vector<unsigned char> data(4096);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i);
  CHECK(checksum(data.data(), 241) == 0x02e8cd95421c6d02);  // these six by xxHash 0.8.3
  CHECK(checksum(data.data(), 256) == 0x9408a4433b952d71);
  CHECK(checksum(data.data(), 1024) == 0xa870f92984398d22);
  CHECK(checksum(data.data(), 1025) == 0x78c86e91ee939852);
  CHECK(checksum(data.data(), 4095) == 0xa15748bbdb7a20f1);
  CHECK(checksum(data.data(), 4096) == 0xeb4b7c3707879151);
}

void written_data_is_read_back(const std::string& which) {
  File file;
  Engine engine(which, 4, 8192, true);
  for (std::size_t bytes : {0ul, 1ul, 4096ul, 8192ul, 8193ul, 300'000ul}) {
    auto data = numbers(bytes);
    std::vector<std::uint64_t> sums(engine.blocks(bytes));
    std::vector<unsigned char> back(bytes);
    CHECK(engine.wait(engine.start({true, file.fd, data.data(), bytes, 4096, sums.data(), 0})).error == 0);
    CHECK(engine.wait(engine.start({false, file.fd, back.data(), bytes, 4096, sums.data(), 0})).error == 0);
    CHECK(back == data);
  }
  CHECK(engine.counters().written_bytes == engine.counters().read_bytes);
}

// Memory that is aligned moves without a buffer; a copy's checksum is that of what was copied, whatever its length.
void memory_anywhere_gives_the_same_file(const std::string& which) {
  File file;
  Engine engine(which, 4, 8192, true);
  const std::size_t bytes = 100'000;
  std::vector<unsigned char> room(bytes + 3 * kAlign);
  const auto data = numbers(bytes);
  std::vector<std::vector<std::uint64_t>> sums(2, std::vector<std::uint64_t>(engine.blocks(bytes)));
  unsigned char* page = room.data() + kAlign - reinterpret_cast<std::uintptr_t>(room.data()) % kAlign;
  for (std::size_t shift : {0ul, 64ul}) {
    std::copy(data.begin(), data.end(), page + shift);
    CHECK(engine.wait(engine.start({true, file.fd, page + shift, bytes, 0, sums[shift != 0].data(), 0})).error == 0);
    std::fill(room.begin(), room.end(), 0);
    CHECK(engine.wait(engine.start({false, file.fd, page + shift, bytes, 0, sums[0].data(), 0})).error == 0);
    CHECK(std::equal(data.begin(), data.end(), page + shift));
  }
  CHECK(sums[0] == sums[1]);
  std::vector<unsigned char> copy(bytes);
  for (std::size_t size = 241; size < bytes; size = size * 3 / 2 + 7) {
    CHECK(checksum_of_copy(copy.data(), data.data(), size) == checksum(data.data(), size));
    CHECK(std::equal(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(size), copy.begin()));
  }
}

void one_flipped_bit_in_any_block_is_found(const std::string& which) {
  File file;
  Engine engine(which, 4, 4096, true);
  const std::size_t bytes = 40'000;
  auto data = numbers(bytes);
  std::vector<std::uint64_t> sums(engine.blocks(bytes));
  CHECK(engine.wait(engine.start({true, file.fd, data.data(), bytes, 0, sums.data(), 0})).error == 0);
  for (std::size_t at = 7; at < bytes; at += 997) {
    const unsigned char wrong = data[at] ^ (1 << (at % 8));
    CHECK(pwrite(file.fd, &wrong, 1, static_cast<off_t>(at)) == 1);
    std::vector<unsigned char> back(bytes);
    const Result result = engine.wait(engine.start({false, file.fd, back.data(), bytes, 0, sums.data(), 0}));
    CHECK(result.error == kWrongChecksum && result.block == at / 4096);
    CHECK(pwrite(file.fd, &data[at], 1, static_cast<off_t>(at)) == 1);
  }
}

void a_file_that_is_cut_off_and_one_that_is_closed_are_errors(const std::string& which) {
  File file;
  Engine engine(which, 2, 4096, true);
  auto data = numbers(20'000);
  std::vector<std::uint64_t> sums(engine.blocks(data.size()));
  CHECK(engine.wait(engine.start({true, file.fd, data.data(), data.size(), 0, sums.data(), 0})).error == 0);
  for (off_t left : {16384, 5000, 0}) {
    CHECK(ftruncate(file.fd, left) == 0);
    const Result result = engine.wait(engine.start({false, file.fd, data.data(), data.size(), 0, sums.data(), 0}));
    CHECK(result.error == kEndOfFile && result.block == static_cast<std::uint64_t>(left / 4096));
  }
  CHECK(engine.wait(engine.start({false, -1, data.data(), data.size(), 0, sums.data(), 0})).error == EBADF);
}

void the_most_urgent_comes_first() {
  File file;
  Engine engine("threads", 1, 4096, true);
  auto bulk = numbers(4096 * 2000), urgent = numbers(4096);
  std::vector<std::uint64_t> sums(2000), one(1);
  const auto delayed = engine.start({true, file.fd, bulk.data(), bulk.size(), 8192, sums.data(), 9});
  const auto soon = engine.start({true, file.fd, urgent.data(), urgent.size(), 0, one.data(), 1});
  CHECK(engine.wait(soon).error == 0);
  CHECK(engine.counters().written_bytes < bulk.size());
  CHECK(engine.wait(delayed).error == 0);
}

void what_has_not_begun_is_cancelled_by_close() {
  File file;
  Engine engine("auto", 1, 4096, true);
  auto bulk = numbers(4096 * 4000);
  std::vector<std::uint64_t> sums(4000);
  const auto ticket = engine.start({true, file.fd, bulk.data(), bulk.size(), 0, sums.data(), 0});
  engine.close();
  CHECK(engine.wait(ticket).error == kCancelled);
  CHECK(engine.wait(engine.start({true, file.fd, bulk.data(), bulk.size(), 0, sums.data(), 0})).error == kCancelled);
}

}  // namespace

int main() {
  checksums_are_those_of_the_published_algorithm();
  for (const char* which : {"auto", "threads"}) {
    written_data_is_read_back(which);
    memory_anywhere_gives_the_same_file(which);
    one_flipped_bit_in_any_block_is_found(which);
    a_file_that_is_cut_off_and_one_that_is_closed_are_errors(which);
  }
  the_most_urgent_comes_first();
  what_has_not_begun_is_cancelled_by_close();
  return 0;
}
