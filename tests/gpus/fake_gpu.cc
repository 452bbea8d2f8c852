// A TensorFlow plugin with GPUs that hold memory but cannot compute: FAKE_GPUS says how many (2).
//
// Its devices have the type GPU, so TensorFlow's own placer, partitioner and kernel constructors treat a graph as on a
// machine with GPUs, and values are copied between the devices and the host. A CUDA kernel must not be run on them.
// The interface: tensorflow/c/experimental/stream_executor/stream_executor.h.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

// Everything is done at once, so streams, events and timers have no state.
struct SP_Stream_st {};
struct SP_Event_st {};
struct SP_Timer_st {};

namespace {

constexpr int64_t kMemoryBytes = int64_t{80} << 30;
constexpr uint64_t kAlignment = 256;

void Succeed(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

void* Allocate(uint64_t size) { return aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment); }

void SetMemory(SP_StreamExecutor* executor) {
  executor->allocate = [](const SP_Device*, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
    memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    memory->opaque = Allocate(size);
    memory->size = size;
  };
  executor->deallocate = [](const SP_Device*, SP_DeviceMemoryBase* memory) {
    free(memory->opaque);
    memory->opaque = nullptr;
  };
  executor->host_memory_allocate = [](const SP_Device*, uint64_t size) { return Allocate(size); };
  executor->host_memory_deallocate = [](const SP_Device*, void* memory) { free(memory); };
  executor->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return false; };
  executor->device_memory_usage = [](const SP_Device*, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = kMemoryBytes;
    return true;
  };
}

void SetCopies(SP_StreamExecutor* executor) {
  executor->memcpy_dtoh = [](const SP_Device*, SP_Stream, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                             TF_Status* status) { memcpy(to, from->opaque, size); Succeed(status); };
  executor->memcpy_htod = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                             TF_Status* status) { memcpy(to->opaque, from, size); Succeed(status); };
  executor->memcpy_dtod = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                             uint64_t size, TF_Status* status) { memcpy(to->opaque, from->opaque, size); Succeed(status); };
  executor->sync_memcpy_dtoh = [](const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                                  TF_Status* status) { memcpy(to, from->opaque, size); Succeed(status); };
  executor->sync_memcpy_htod = [](const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                                  TF_Status* status) { memcpy(to->opaque, from, size); Succeed(status); };
  executor->sync_memcpy_dtod = [](const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                                  uint64_t size, TF_Status* status) { memcpy(to->opaque, from->opaque, size); Succeed(status); };
  executor->mem_zero = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, uint64_t size, TF_Status* status) {
    memset(to->opaque, 0, size);
    Succeed(status);
  };
  executor->memset = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, uint8_t value, uint64_t size,
                        TF_Status* status) { memset(to->opaque, value, size); Succeed(status); };
  executor->memset32 = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, uint32_t value, uint64_t size,
                          TF_Status* status) {
    for (uint64_t i = 0; i < size / sizeof(value); ++i) static_cast<uint32_t*>(to->opaque)[i] = value;
    Succeed(status);
  };
}

void SetStreams(SP_StreamExecutor* executor) {
  executor->create_stream = [](const SP_Device*, SP_Stream* stream, TF_Status* status) {
    *stream = new SP_Stream_st;
    Succeed(status);
  };
  executor->destroy_stream = [](const SP_Device*, SP_Stream stream) { delete stream; };
  executor->create_stream_dependency = [](const SP_Device*, SP_Stream, SP_Stream, TF_Status* status) { Succeed(status); };
  executor->get_stream_status = [](const SP_Device*, SP_Stream, TF_Status* status) { Succeed(status); };
  executor->create_event = [](const SP_Device*, SP_Event* event, TF_Status* status) {
    *event = new SP_Event_st;
    Succeed(status);
  };
  executor->destroy_event = [](const SP_Device*, SP_Event event) { delete event; };
  executor->get_event_status = [](const SP_Device*, SP_Event) { return SE_EVENT_COMPLETE; };
  executor->record_event = [](const SP_Device*, SP_Stream, SP_Event, TF_Status* status) { Succeed(status); };
  executor->wait_for_event = [](const SP_Device*, SP_Stream, SP_Event, TF_Status* status) { Succeed(status); };
  executor->create_timer = [](const SP_Device*, SP_Timer* timer, TF_Status* status) {
    *timer = new SP_Timer_st;
    Succeed(status);
  };
  executor->destroy_timer = [](const SP_Device*, SP_Timer timer) { delete timer; };
  executor->start_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status* status) { Succeed(status); };
  executor->stop_timer = executor->start_timer;
  executor->block_host_for_event = [](const SP_Device*, SP_Event, TF_Status* status) { Succeed(status); };
  executor->block_host_until_done = [](const SP_Device*, SP_Stream, TF_Status* status) { Succeed(status); };
  executor->synchronize_all_activity = [](const SP_Device*, TF_Status* status) { Succeed(status); };
  executor->host_callback = [](const SP_Device*, SP_Stream, SE_StatusCallbackFn call, void* argument) -> TF_Bool {
    TF_Status* status = TF_NewStatus();
    call(argument, status);
    TF_DeleteStatus(status);
    return true;
  };
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
  functions->destroy_device = [](const SP_Platform*, SP_Device*) {};
  functions->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status* status) {
    params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
    params->device_fns->get_numa_node = [](const SP_Device*) { return 0; };
    Succeed(status);
  };
  functions->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  functions->create_stream_executor = [](const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status* status) {
    params->stream_executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
    SetMemory(params->stream_executor);
    SetCopies(params->stream_executor);
    SetStreams(params->stream_executor);
    Succeed(status);
  };
  functions->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  functions->create_timer_fns = [](const SP_Platform*, SP_TimerFns* timer, TF_Status* status) {
    timer->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    timer->nanoseconds = [](SP_Timer) { return uint64_t{1}; };
    Succeed(status);
  };
  functions->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
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
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
  Succeed(status);
}
