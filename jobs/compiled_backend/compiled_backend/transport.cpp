// The transport of CompiledBackend: non-blocking collectives of MPI. For another library, replace the calls of MPI_*.
#include <mpi.h>
#include <pybind11/numpy.h>

#include <cstdint>
#include <map>
#include <string>

namespace py = pybind11;

const std::map<char, MPI_Datatype> DATATYPES = {{'i', MPI_INT}, {'l', MPI_LONG}, {'f', MPI_FLOAT}, {'d', MPI_DOUBLE}};
const std::map<std::string, MPI_Op> OPS = {{"SUM", MPI_SUM}, {"PRODUCT", MPI_PROD}};

// Raise mpi4py's exception, which hpccomm translates for the program.
static void check(int code) {
    if (code != MPI_SUCCESS) {
        py::object exception = py::module_::import("mpi4py.MPI").attr("Exception");
        PyErr_SetObject(exception.ptr(), exception(code).ptr());
        throw py::error_already_set();
    }
}

// An operation in flight.
struct Request {
    py::array array;  // MPI uses its memory
    MPI_Request request = MPI_REQUEST_NULL;

    bool poll() {
        int is_done = 0;
        check(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE));
        return is_done;
    }
};

// Contiguous arrays of fewer than 2^31 bytes over one communicator.
struct Transport {
    MPI_Comm comm;

    explicit Transport(std::uintptr_t handle) : comm((MPI_Comm)handle) {}

    static bool reduces(char dtype, const std::string &op) { return DATATYPES.count(dtype) && OPS.count(op); }

    Request all_reduce(py::array array, const std::string &op) {
        Request started{array};
        check(MPI_Iallreduce(MPI_IN_PLACE, array.mutable_data(), (int)array.size(),
                             DATATYPES.at(array.dtype().char_()), OPS.at(op), comm, &started.request));
        return started;
    }

    Request broadcast(py::array array, int root) {
        Request started{array};
        void *memory = const_cast<void *>(array.data());  // root's array may be read-only
        check(MPI_Ibcast(memory, (int)array.nbytes(), MPI_BYTE, root, comm, &started.request));
        return started;
    }

    Request barrier() {
        Request started;
        check(MPI_Ibarrier(comm, &started.request));
        return started;
    }
};

PYBIND11_MODULE(transport, module) {
    py::class_<Request>(module, "Request").def("poll", &Request::poll);
    py::class_<Transport>(module, "Transport")
        .def(py::init<std::uintptr_t>())
        .def_static("reduces", &Transport::reduces)
        .def("all_reduce", &Transport::all_reduce)
        .def("broadcast", &Transport::broadcast)
        .def("barrier", &Transport::barrier);
}
