package checkpoint

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// golden was written by k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/checkpoint.
const golden = "testdata/kubelet-v1.36.3.json"

func TestRoundTrip(t *testing.T) {
	blob, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	entries, registered, err := Unmarshal(blob)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || entries[0].ContainerName != "main" {
		t.Errorf("entries: %v", entries)
	}
	if diff := cmp.Diff([]string{"0-1", "0-2", "1-1"}, registered["example.com/memory"]); diff != "" {
		t.Errorf("registered devices (-want +got):\n%s", diff)
	}
	path := filepath.Join(t.TempDir(), "checkpoint")
	if err := Write(path, entries, registered); err != nil {
		t.Fatal(err)
	}
	written, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(blob), string(written)); diff != "" {
		t.Errorf("written again (-want +got):\n%s", diff)
	}
}

func TestWrongChecksum(t *testing.T) {
	blob, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Unmarshal(bytes.Replace(blob, []byte("0-2"), []byte("0-3"), 1)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("error is %v, want ErrCorrupt", err)
	}
}
