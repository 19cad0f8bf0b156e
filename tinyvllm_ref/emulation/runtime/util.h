// The little that the runtime needs of a standard library. It uses libc and pthreads alone, so that a compiler
// without a C++ library at hand (the ziglang wheel builds its own, in a minute) has nothing to build first.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace emu {

class Mutex {
  public:
    void lock() { pthread_mutex_lock(&mutex_); }
    void unlock() { pthread_mutex_unlock(&mutex_); }
    pthread_mutex_t* native() { return &mutex_; }

  private:
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class Hold {
  public:
    explicit Hold(Mutex& mutex) : mutex_(mutex) { mutex_.lock(); }
    ~Hold() { mutex_.unlock(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

  private:
    Mutex& mutex_;
};

// A growing array of plain values.
template <class T>
class Array {
  public:
    size_t size() const { return size_; }
    T& operator[](size_t k) { return data_[k]; }
    const T& operator[](size_t k) const { return data_[k]; }
    T& back() { return data_[size_ - 1]; }
    void clear() { size_ = 0; }
    void free_memory() {
        free((void*)data_);
        data_ = nullptr;
        size_ = capacity_ = 0;
    }
    void pop() { size_--; }
    void remove_unordered(size_t k) { data_[k] = data_[--size_]; }
    T& push(const T& value) {
        if (size_ == capacity_) grow();
        return data_[size_++] = value;
    }
    void resize(size_t n) {  // new elements are zero bytes
        while (capacity_ < n) grow();
        if (n > size_) memset((void*)(data_ + size_), 0, (n - size_) * sizeof(T));
        size_ = n;
    }

  private:
    void grow() {
        capacity_ = capacity_ ? capacity_ * 2 : 64;
        void* p = realloc((void*)data_, capacity_ * sizeof(T));
        if (!p) abort();
        data_ = (T*)p;
    }
    T* data_ = nullptr;
    size_t size_ = 0, capacity_ = 0;
};

}  // namespace emu
