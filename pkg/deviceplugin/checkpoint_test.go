package deviceplugin

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// entry is an entry of the kubelet's checkpoint, in the kubelet's format.
type entry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[int64][]string
	AllocResp                           []byte
}

// newEntry returns the entry of a container that got these devices with a response that names the card.
func newEntry(t testing.TB, uid, container string, card int, ids ...string) entry {
	t.Helper()
	return newEntryOf(t, uid, container, protocol.ContainerEnv{Cards: []gpu.Card{{Index: card, Memory: 16}}}, ids...)
}

// newEntryOf returns the entry of a container that got these devices with a response of this environment.
func newEntryOf(t testing.TB, uid, container string, env protocol.ContainerEnv, ids ...string) entry {
	t.Helper()
	env.ContainerRequest = gpu.Memory(len(ids))
	response, err := proto.Marshal(&pluginapi.ContainerAllocateResponse{Envs: env.Variables()})
	check.Must(t, err)
	return entry{uid, container, string(protocol.ResourceMemory), map[int64][]string{-1: ids}, response}
}

func checkpointData(t testing.TB, entries ...entry) []byte {
	t.Helper()
	data, err := json.Marshal(map[string]any{
		"Data": map[string]any{
			"PodDeviceEntries":  entries,
			"RegisteredDevices": map[string][]string{string(protocol.ResourceMemory): {"00", "01"}},
		},
		"Checksum": 12345,
	})
	check.Must(t, err)
	return data
}

// writeCheckpoint replaces the checkpoint file atomically, as the kubelet does.
func writeCheckpoint(t testing.TB, dir string, entries ...entry) {
	t.Helper()
	temporary := filepath.Join(dir, ".new-checkpoint")
	check.Must(t, os.WriteFile(temporary, checkpointData(t, entries...), 0o600))
	check.Must(t, os.Rename(temporary, filepath.Join(dir, checkpointFile)))
}

func TestParseCheckpoint(t *testing.T) {
	other := newEntry(t, "uid-b", "main", 0, "x")
	other.ResourceName = "example.com/other"
	garbled := newEntry(t, "uid-c", "main", 0, "05")
	garbled.AllocResp = []byte("\xff\xff\xff")
	withoutResponse := newEntry(t, "uid-f", "main", 0, "07")
	withoutResponse.AllocResp = nil
	spread := newEntry(t, "uid-d", "main", 2)
	spread.DeviceIDs = map[int64][]string{0: {"21"}, 1: {"20"}}

	got, err := parseCheckpoint(checkpointData(t, newEntry(t, "uid-a", "init", 1, "11", "10"), other, garbled, spread,
		newEntry(t, "uid-e", "main", -1, "06"), withoutResponse,
		newEntryOf(t, "uid-g", "main", protocol.ContainerEnv{Cards: []gpu.Card{{Index: 2, Memory: 16}, {Index: 0, Memory: 24}}, ContainerCores: 60}, "08", "09", "28", "29")), &isolation.Backends{})
	check.Must(t, err)
	entryOf := func(uid gpu.PodUID, container string, given allocation.Allocation, ids ...string) allocation.Entry {
		given.Devices = allocation.NewDeviceSet(ids)
		return allocation.Entry{ContainerKey: allocation.ContainerKey{UID: uid, Name: container}, Allocation: given}
	}
	unknown := allocation.Allocation{Unknown: true}
	want := []allocation.Entry{
		entryOf("uid-a", "init", allocation.Allocation{Cards: gpu.On(1, 2), CardMemory: []gpu.Memory{16}}, "10", "11"),
		entryOf("uid-c", "main", unknown, "05"),
		entryOf("uid-d", "main", allocation.Allocation{Cards: gpu.On(2, 2), CardMemory: []gpu.Memory{16}}, "20", "21"),
		entryOf("uid-e", "main", allocation.Allocation{}, "06"), entryOf("uid-f", "main", unknown, "07"),
		entryOf("uid-g", "main", allocation.Allocation{
			Cards:      gpu.Placement{{Card: 0, Memory: 2, Cores: 30, Containers: 1}, {Card: 2, Memory: 2, Cores: 30, Containers: 1}},
			CardMemory: []gpu.Memory{24, 16},
		}, "08", "09", "28", "29"),
	}
	check.Equal(t, "the result", want, got)
	for _, bad := range []string{"", "null", "{}", "[]", `{"Data":7}`, `{"Data":{"PodDeviceEntries":[{"AllocResp":"!"}]}}`} {
		if got, err := parseCheckpoint([]byte(bad), &isolation.Backends{}); err == nil {
			t.Errorf("%q gave %v, want an error", bad, got)
		}
	}
}

func FuzzParseCheckpoint(f *testing.F) {
	f.Add(checkpointData(f, newEntry(f, "uid-a", "main", 1, "10", "11")))
	f.Add(checkpointData(f, newEntryOf(f, "uid-a", "main", protocol.ContainerEnv{Cards: newCards(16, 24), ContainerCores: 50}, "10", "11", "00")))
	f.Add([]byte(`{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":0}`))
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"aliyun.com/gpu-mem","DeviceIDs":{"-1":["a"]},"AllocResp":"CgA="}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, err := parseCheckpoint(data, &isolation.Backends{})
		if err != nil {
			return
		}
		for _, e := range entries {
			if e.UID == "" || e.Name == "" {
				t.Errorf("an entry without a name: %+v", e)
			}
			cards := e.Cards.Cards()
			if len(e.CardMemory) != len(cards) || e.Unknown && len(cards) > 0 || !slices.IsSorted(cards) || len(slices.Compact(cards)) < len(e.Cards) {
				t.Errorf("an entry with invalid cards: %+v", e)
			}
			for _, share := range e.Cards {
				if share.Memory < 0 || share.Cores < 0 || share.Cores > gpu.CardCores {
					t.Errorf("an entry with an invalid share: %+v", e)
				}
			}
		}
	})
}

func TestCheckpointRead(t *testing.T) {
	dir := t.TempDir()
	c := checkpoint{dir: dir, backends: &isolation.Backends{}}
	expect := func(when string, want ...string) {
		t.Helper()
		if err := c.read(); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		var got []string
		for _, e := range c.entries {
			got = append(got, string(e.UID))
		}
		check.Equal(t, when, want, got)
	}
	expect("without a file")
	writeCheckpoint(t, dir, newEntry(t, "a", "main", 0, "00"))
	expect("with one", "a")
	expect("read again", "a")
	writeCheckpoint(t, dir, newEntry(t, "a", "main", 0, "00"), newEntry(t, "b", "main", 0, "01"))
	expect("replaced", "a", "b")
	check.Must(t, os.WriteFile(filepath.Join(dir, checkpointFile), []byte("garbage"), 0o600))
	if err := c.read(); err == nil || len(c.entries) != 2 {
		t.Errorf("an invalid file gave %v, %v, want an error and the last entries", c.entries, err)
	}
	check.Must(t, os.Remove(filepath.Join(dir, checkpointFile)))
	expect("removed")
}

// TestCheckpointProblem: a file that can't be read is logged once, although it is read every second.
func TestCheckpointProblem(t *testing.T) {
	dir := t.TempDir()
	c := checkpoint{dir: dir, backends: &isolation.Backends{}, record: allocation.NewRecord(nil)}
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	expect := func(when string, lines int) {
		t.Helper()
		c.Sync(ctx)
		c.Sync(ctx)
		if got := strings.Count(log.String(), "Could not read"); got != lines {
			t.Errorf("%s: %d lines, want %d", when, got, lines)
		}
	}
	expect("without a file", 0)
	check.Must(t, os.WriteFile(filepath.Join(dir, checkpointFile), []byte("garbage"), 0o600))
	expect("an invalid file", 1)
	check.Must(t, os.Remove(filepath.Join(dir, checkpointFile)))
	expect("removed", 1)
	check.Must(t, os.WriteFile(filepath.Join(dir, checkpointFile), []byte("garbage"), 0o600))
	expect("invalid again", 2)
}
