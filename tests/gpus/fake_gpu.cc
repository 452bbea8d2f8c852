// A TensorFlow plugin with GPUs that have memory but cannot compute: FAKE_GPUS says how many (2).
//
// Its devices have the type GPU, so TensorFlow's own placer, partitioner and kernel constructors treat a graph as on a
// machine with GPUs. Nothing may be run on them: no value is copied or set.
// The interface: tensorflow/c/experimental/stream_executor/stream_executor.h.

#include <cstdint>
#include <cstdlib>
#include <tuple>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

// Everything is done at once, so streams, events and timers have no state.
struct SP_Stream_st {} stream;
struct SP_Event_st {} event;
struct SP_Timer_st {} timer;

namespace {

constexpr int64_t kMemoryBytes = int64_t{80} << 30;
constexpr uint64_t kAlignment = 256;

template <typename... Args>  // of which the status is the last
void Succeed(Args... args) { TF_SetStatus(std::get<sizeof...(Args) - 1>(std::make_tuple(args...)), TF_OK, ""); }

template <typename... Args>
void DoNothing(Args...) {}

void* Allocate(const SP_Device*, uint64_t size) {
  return aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
}

void SetExecutor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status* status) {
  SP_StreamExecutor* executor = params->stream_executor;
  executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  executor->allocate = [](const SP_Device* device, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
    memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    memory->opaque = Allocate(device, size);
    memory->size = size;
  };
  executor->deallocate = [](const SP_Device*, SP_DeviceMemoryBase* memory) { free(memory->opaque); };
  executor->host_memory_allocate = Allocate;
  executor->host_memory_deallocate = [](const SP_Device*, void* memory) { free(memory); };
  executor->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return false; };
  executor->device_memory_usage = [](const SP_Device*, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = kMemoryBytes;
    return true;
  };
  executor->memcpy_dtoh = Succeed;
  executor->memcpy_htod = Succeed;
  executor->memcpy_dtod = Succeed;
  executor->sync_memcpy_dtoh = Succeed;
  executor->sync_memcpy_htod = Succeed;
  executor->sync_memcpy_dtod = Succeed;
  executor->mem_zero = Succeed;
  executor->memset = Succeed;
  executor->memset32 = Succeed;
  executor->create_stream = [](const SP_Device*, SP_Stream* made, TF_Status* status) { Succeed(*made = &stream, status); };
  executor->create_event = [](const SP_Device*, SP_Event* made, TF_Status* status) { Succeed(*made = &event, status); };
  executor->create_timer = [](const SP_Device*, SP_Timer* made, TF_Status* status) { Succeed(*made = &timer, status); };
  executor->destroy_stream = DoNothing;
  executor->destroy_event = DoNothing;
  executor->destroy_timer = DoNothing;
  executor->create_stream_dependency = Succeed;
  executor->get_stream_status = Succeed;
  executor->get_event_status = [](const SP_Device*, SP_Event) { return SE_EVENT_COMPLETE; };
  executor->record_event = Succeed;
  executor->wait_for_event = Succeed;
  executor->start_timer = Succeed;
  executor->stop_timer = Succeed;
  executor->block_host_for_event = Succeed;
  executor->block_host_until_done = Succeed;
  executor->synchronize_all_activity = Succeed;
  executor->host_callback = [](const SP_Device*, SP_Stream, SE_StatusCallbackFn call, void* argument) -> TF_Bool {
    TF_Status* status = TF_NewStatus();
    call(argument, status);
    TF_DeleteStatus(status);
    return true;
  };
  Succeed(status);
}

void SetPlatform(SP_PlatformFns* functions) {
  functions->get_device_count = [](const SP_Platform*, int* count, TF_Status* status) {
    const char* wanted = getenv("FAKE_GPUS");
    *count = wanted ? atoi(wanted) : 2;
    Succeed(status);
  };
  functions->create_device = [](const SP_Platform*, SE_CreateDeviceParams* params, TF_Status* status) {
    params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    params->device->ordinal = params->ordinal;
    params->device->hardware_name = "fake GPU";
    params->device->device_vendor = "tower_train";
    params->device->pci_bus_id = "0000:00:00.0";
    Succeed(status);
  };
  functions->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status* status) {
    params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
    params->device_fns->get_numa_node = [](const SP_Device*) { return 0; };
    Succeed(status);
  };
  functions->create_stream_executor = SetExecutor;
  functions->create_timer_fns = [](const SP_Platform*, SP_TimerFns* timer, TF_Status* status) {
    timer->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    timer->nanoseconds = [](SP_Timer) { return uint64_t{1}; };
    Succeed(status);
  };
  functions->destroy_device = DoNothing;
  functions->destroy_device_fns = DoNothing;
  functions->destroy_stream_executor = DoNothing;
  functions->destroy_timer_fns = DoNothing;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void SE_InitPlugin(SE_PlatformRegistrationParams* params,
                                                                     TF_Status* status) {
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "FAKE";
  params->platform->type = "GPU";
  params->platform->supports_unified_memory = false;
  params->platform->use_bfc_allocator = true;
  params->platform->force_memory_growth = true;
  params->platform_fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  SetPlatform(params->platform_fns);
  params->destroy_platform = DoNothing;
  params->destroy_platform_fns = DoNothing;
  Succeed(status);
}
