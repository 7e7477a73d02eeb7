package isolation

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpushare/gpushare/pkg/file"
)

// The specification of limits has a CDI device for each limit that a container was given. A device sets only environment
// variables, which NVIDIA's hook reads. A runtime applies CDI devices after the container's own environment, so no pod can set them
// to something else. A container that restarts needs the device that it was given, so devices are never removed: there are few different limits, and a
// restart of the machine empties the directory.
const (
	limitKind = "gpushare.aliyun.com/memory-limit"
	limitFile = "gpushare.aliyun.com-memory-limit.json"
	// limitSuffix ends a device's name, after the number of mebibytes.
	limitSuffix = "Mi"
	// limitVersion is the version of the specification's format: the first one in which a device's name can begin with a digit.
	limitVersion = "0.5.0"

	mebibyte = 1 << 20
)

// Variables of NVIDIA's hook (NVIDIA/nvidia-container-toolkit, cmd/nvidia-cdi-hook/apply-cuda-memory-limits), in MiB. Without a
// request the hook takes the limit as request, and a request above 0 leaks on the parent cgroups when the container ends.
const (
	envMemoryLimit   = "NVIDIA_GPU_MEMORY_LIMIT"
	envMemoryRequest = "NVIDIA_GPU_MEMORY_REQUEST"
)

// limitDevice returns the name of the CDI device of a limit in bytes, which must be a positive number of mebibytes.
func limitDevice(limit uint64) (string, error) {
	if limit == 0 || limit%mebibyte != 0 {
		return "", fmt.Errorf("a limit of %d bytes is no positive number of MiB", limit)
	}
	return limitKind + "=" + strconv.FormatUint(limit/mebibyte, 10) + limitSuffix, nil
}

// limitOf returns the limit in bytes of the CDI device of this name, and whether it is the device of a limit.
func limitOf(device string) (limit uint64, ok bool) {
	name, ok := strings.CutPrefix(device, limitKind+"=")
	if !ok {
		return 0, false
	}
	return limitOfName(name)
}

func limitOfName(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, limitSuffix)
	n, err := strconv.ParseUint(digits, 10, 44)
	if !ok || err != nil || n == 0 || digits[0] == '0' || digits[0] == '+' {
		return 0, false
	}
	return n * mebibyte, true
}

// limitSpec is the specification of limits in a directory that the container runtime reads. Other programs have files there too, and can remove
// this one. mu guards the file.
type limitSpec struct {
	dir string
	mu  sync.Mutex
}

// Add makes sure that the specification has devices for these limits in bytes. It writes the file only if it lacks one of them.
func (s *limitSpec) Add(limits ...uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	has, err := s.read()
	if err != nil {
		return err
	}
	before := len(has)
	for _, limit := range limits {
		if _, err := limitDevice(limit); err != nil {
			return err
		}
		has[limit] = true
	}
	if len(has) == before {
		return nil
	}
	if err := s.write(has); err != nil {
		return fmt.Errorf("writing the CDI specification of limits: %w", err)
	}
	return nil
}

// Check returns why the specification can't be written.
func (s *limitSpec) Check() error {
	if err := unix.Access(s.dir, unix.W_OK); err != nil {
		return fmt.Errorf("writing the CDI specification of limits to %s: %w", s.dir, err)
	}
	return nil
}

func (s *limitSpec) path() string { return filepath.Join(s.dir, limitFile) }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// read returns the limits of the file; none if there is no file, or one that isn't a specification.
func (s *limitSpec) read() (map[uint64]bool, error) {
	limits := map[uint64]bool{}
	data, err := os.ReadFile(s.path())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading the CDI specification of limits: %w", err)
	}
	var spec cdi.Spec
	if err != nil || json.Unmarshal(data, &spec) != nil {
		return limits, nil
	}
	for _, device := range spec.Devices {
		if limit, ok := limitOfName(device.Name); ok {
			limits[limit] = true
		}
	}
	return limits, nil
}

// write replaces the file at once: the runtime reads it at each start of a container.
func (s *limitSpec) write(limits map[uint64]bool) error {
	spec := cdi.Spec{Version: limitVersion, Kind: limitKind}
	for _, limit := range slices.Sorted(maps.Keys(limits)) {
		n := strconv.FormatUint(limit/mebibyte, 10)
		spec.Devices = append(spec.Devices, cdi.Device{Name: n + limitSuffix, ContainerEdits: cdi.ContainerEdits{
			Env: []string{envMemoryLimit + "=" + n, envMemoryRequest + "=0"},
		}})
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return file.Replace(s.path(), data)
}
