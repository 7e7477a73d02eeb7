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

// checkpointFile is the file in which the kubelet keeps the devices that it allocated (k8s.io/kubernetes
// pkg/kubelet/cm/devicemanager/types.go), in the directory of the plugins' sockets. The kubelet replaces the whole file after
// each allocation and before the next one.
const checkpointFile = "kubelet_internal_checkpoint"

// maxCheckpoint bounds the number of bytes that are read. For a full node with the smallest unit the file has a few MiB.
const maxCheckpoint = 64 << 20

// booking is the entry of one container in the kubelet's checkpoint: what the container really got.
type booking struct {
	UID       gpu.PodUID
	Container string
	// Devices are the device IDs, and Request is their number.
	Devices deviceSet
	Request gpu.Memory
	// Env is the environment of the plugin's response; nil if the entry has no response in a known form.
	Env map[string]string
}

// checkpointJSON is the part of k8s.io/kubernetes pkg/kubelet/cm/devicemanager/checkpoint that is read here. The checksum
// covers the printed form of a Go value, so other programs can't compute it. It isn't needed: the file is replaced atomically.
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

// parseCheckpoint returns the entries for GPU memory.
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

// checkpoint reads the kubelet's checkpoint file if it was replaced since the last read. It is not safe for concurrent use.
type checkpoint struct {
	dir      string
	last     fs.FileInfo
	bookings []booking
}

// Written returns when the content that Read last returned was written; zero if there was no file.
func (c *checkpoint) Written() time.Time {
	if c.last == nil {
		return time.Time{}
	}
	return c.last.ModTime()
}

// Read returns the entries of the checkpoint; none if the file doesn't exist. With an error it returns the entries of the last
// successful read.
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

// sameFile reports whether both are the same file in the same state. The inode alone isn't enough: a new file can get the inode
// of a deleted one.
func sameFile(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
