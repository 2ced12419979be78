// Something for a compiler to do: containers and algorithms of many types.
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

template <int N> struct Key {
    std::tuple<int, std::string, std::vector<int>> parts;
    bool operator<(const Key &other) const { return parts < other.parts; }
};

template <int N> int work() {
    std::map<Key<N>, std::variant<int, std::string, std::vector<Key<N>>>> table;
    std::set<std::pair<Key<N>, int>> set;
    std::vector<Key<N>> keys;
    for (int i = 0; i < N; i++) {
        Key<N> key{{i % 7, std::to_string(i), {i, i + 1}}};
        table[key] = i % 2 ? decltype(table[key])(i) : std::string("even");
        set.emplace(key, i);
        keys.push_back(key);
    }
    std::sort(keys.begin(), keys.end());
    std::stable_sort(keys.begin(), keys.end(), [](const auto &a, const auto &b) { return b < a; });
    std::function<int(const Key<N> &)> first = [](const Key<N> &key) { return std::get<0>(key.parts); };
    int sum = std::accumulate(keys.begin(), keys.end(), 0, [&](int s, const Key<N> &key) { return s + first(key); });
    return sum + int(table.size()) + int(set.size()) + work<N - 1>();
}

template <> int work<0>() { return 0; }

int main() {
    std::cout << work<1>() << "\n";
}
