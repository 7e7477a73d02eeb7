package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// checkpointFile is where the kubelet keeps what its device plugins handed out
// (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/types.go), in the directory of the plugins' sockets. It replaces the
// file as a whole, after each allocation and before the next one.
const checkpointFile = "kubelet_internal_checkpoint"

// maxCheckpoint bounds what is read: a full node in the finest unit comes to a few MiB.
const maxCheckpoint = 64 << 20

// booking is one container in the kubelet's books: what it was given, in truth.
type booking struct {
	UID       gpu.PodUID
	Container string
	// Devices are the IDs, and Request how many there are.
	Devices deviceSet
	Request gpu.Memory
	// Env is the environment of our answer, nil where the kubelet's file doesn't have it in a form that we know.
	Env map[string]string
}

// checkpointJSON is the part of k8s.io/kubernetes pkg/kubelet/cm/devicemanager/checkpoint that is read here. Its
// checksum covers a Go value's printed form and can't be computed by others; the file is replaced atomically anyway.
type checkpointJSON struct {
	Data *struct {
		PodDeviceEntries []struct {
			PodUID        string
			ContainerName string
			ResourceName  corev1.ResourceName
			// DeviceIDs are grouped by NUMA node.
			DeviceIDs map[string][]string
			AllocResp []byte
		}
	}
}

// parseCheckpoint returns the bookings of GPU memory.
func parseCheckpoint(data []byte) ([]booking, error) {
	var file checkpointJSON
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("reading the kubelet's checkpoint: %w", err)
	}
	if file.Data == nil {
		return nil, errors.New("reading the kubelet's checkpoint: it has no Data")
	}
	var bookings []booking
	for _, entry := range file.Data.PodDeviceEntries {
		if entry.ResourceName != protocol.ResourceMemory || entry.PodUID == "" || entry.ContainerName == "" {
			continue
		}
		var ids []string
		for _, group := range entry.DeviceIDs {
			ids = append(ids, group...)
		}
		b := booking{
			UID: gpu.PodUID(entry.PodUID), Container: entry.ContainerName,
			Devices: newDeviceSet(ids), Request: gpu.Memory(len(ids)),
		}
		var response pluginapi.ContainerAllocateResponse
		if err := proto.Unmarshal(entry.AllocResp, &response); err == nil {
			b.Env = response.Envs
		}
		bookings = append(bookings, b)
	}
	return bookings, nil
}

// checkpoint reads the kubelet's file, and only when it has been replaced since the last time. One goroutine uses it
// at a time.
type checkpoint struct {
	dir      string
	last     fs.FileInfo
	bookings []booking
}

// Written returns when the books that Read returned last were written.
func (c *checkpoint) Written() time.Time {
	if c.last == nil {
		return time.Time{}
	}
	return c.last.ModTime()
}

// Read returns the kubelet's books. A file that isn't there says that it has none. On an error they are what they were
// the last time.
func (c *checkpoint) Read() ([]booking, error) {
	file, err := os.Open(filepath.Join(c.dir, checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		c.last, c.bookings = nil, nil
		return nil, nil
	}
	if err != nil {
		return c.bookings, fmt.Errorf("opening the kubelet's checkpoint: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return c.bookings, fmt.Errorf("looking at the kubelet's checkpoint: %w", err)
	}
	if sameFile(c.last, info) {
		return c.bookings, nil
	}
	data, err := io.ReadAll(io.LimitReader(file, maxCheckpoint))
	if err != nil {
		return c.bookings, fmt.Errorf("reading the kubelet's checkpoint: %w", err)
	}
	bookings, err := parseCheckpoint(data)
	if err != nil {
		return c.bookings, err
	}
	c.last, c.bookings = info, bookings
	return bookings, nil
}

// sameFile says whether both are one file in one state. An inode alone isn't enough: a file made anew can get the old
// one's.
func sameFile(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
