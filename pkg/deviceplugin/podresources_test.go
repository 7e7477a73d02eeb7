package deviceplugin

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/test/check"
)

// answering is a PodResources service with an answer that the test sets.
type answering struct {
	podresourcesv1.UnimplementedPodResourcesListerServer
	answer func(pod string) (*podresourcesv1.PodResources, error)
	asked  int
}

func (a *answering) Get(_ context.Context, r *podresourcesv1.GetPodResourcesRequest) (*podresourcesv1.GetPodResourcesResponse, error) {
	a.asked++
	pod, err := a.answer(r.PodNamespace + "/" + r.PodName)
	return &podresourcesv1.GetPodResourcesResponse{PodResources: pod}, err
}

func serveAnswers(t *testing.T, a *answering) *podResources {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "p.sock")
	listener, err := net.Listen("unix", socket)
	check.Must(t, err)
	server := grpc.NewServer()
	podresourcesv1.RegisterPodResourcesListerServer(server, a)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	p, err := newPodResources(socket)
	check.Must(t, err)
	t.Cleanup(p.Close)
	return p
}

func candidateOf(options ...podOption) allocation.Candidate { return nthOf(0, options...) }

func nthOf(n int, options ...podOption) allocation.Candidate {
	pod := readPod(newPod("a", options...))
	return allocation.Candidate{Pod: &pod, Container: pod.Containers[n]}
}

func TestState(t *testing.T) {
	devices := func(resource string, ids ...string) []*podresourcesv1.ContainerDevices {
		return []*podresourcesv1.ContainerDevices{{ResourceName: resource, DeviceIds: ids}}
	}
	pod := func(containers ...*podresourcesv1.ContainerResources) *podresourcesv1.PodResources {
		return &podresourcesv1.PodResources{Name: "a", Namespace: "default", Containers: containers}
	}
	for name, test := range map[string]struct {
		candidate allocation.Candidate
		pod       *podresourcesv1.PodResources
		err       error
		want      allocation.KubeletState
		asked     int
	}{
		"no devices": {
			candidateOf(main(2)), pod(&podresourcesv1.ContainerResources{Name: "main"}), nil, allocation.StateWaiting, 1,
		},
		"devices": {
			candidateOf(main(2)), pod(&podresourcesv1.ContainerResources{Name: "main", Devices: devices("aliyun.com/gpu-mem", "00")}), nil, allocation.StateAllocated, 1,
		},
		"another plugin's devices": {
			candidateOf(main(2)), pod(&podresourcesv1.ContainerResources{Name: "main", Devices: devices("example.com/nic", "00")}), nil, allocation.StateWaiting, 1,
		},
		"another container's devices": {
			candidateOf(main(2), container("y", 2)),
			pod(&podresourcesv1.ContainerResources{Name: "main"}, &podresourcesv1.ContainerResources{Name: "y", Devices: devices("aliyun.com/gpu-mem", "00")}),
			nil, allocation.StateWaiting, 1,
		},
		"an init container, and no container has devices": {
			candidateOf(initStep(2), main(2)), pod(&podresourcesv1.ContainerResources{Name: "main"}), nil, allocation.StateWaiting, 1,
		},
		"an init container, and a later container has devices": {
			candidateOf(initStep(2), main(2)),
			pod(&podresourcesv1.ContainerResources{Name: "main", Devices: devices("aliyun.com/gpu-mem", "00")}), nil, allocation.StateAllocated, 1,
		},
		"an init container, and a sidecar before it has devices": {
			nthOf(1, sidecar("s", 1), initStep(2), main(2)),
			pod(&podresourcesv1.ContainerResources{Name: "s", Devices: devices("aliyun.com/gpu-mem", "00")}, &podresourcesv1.ContainerResources{Name: "main"}),
			nil, allocation.StateWaiting, 1,
		},
		"an init container, and a sidecar after it has devices": {
			nthOf(0, initStep(2), sidecar("s", 1), main(2)),
			pod(&podresourcesv1.ContainerResources{Name: "s", Devices: devices("aliyun.com/gpu-mem", "00")}, &podresourcesv1.ContainerResources{Name: "main"}),
			nil, allocation.StateAllocated, 1,
		},
		"an unknown pod":                  {candidateOf(main(2)), nil, errors.New("pod a not found"), allocation.StateAbsent, 1},
		"an unknown pod, with its code":   {candidateOf(main(2)), nil, status.Error(codes.NotFound, "pod a not found"), allocation.StateAbsent, 1},
		"a call that is switched off":     {candidateOf(main(2)), nil, errors.New("PodResources API Get method disabled"), allocation.StateUnknown, 1},
		"a call that it doesn't have":     {candidateOf(main(2)), nil, status.Error(codes.Unimplemented, "what?"), allocation.StateUnknown, 1},
		"a kubelet that can't be reached": {candidateOf(main(2)), nil, status.Error(codes.Unavailable, "gone"), allocation.StateUnknown, 1},
		"an empty answer":                 {candidateOf(main(2)), nil, nil, allocation.StateWaiting, 1},
	} {
		t.Run(name, func(t *testing.T) {
			service := &answering{answer: func(string) (*podresourcesv1.PodResources, error) { return test.pod, test.err }}
			p := serveAnswers(t, service)
			if got := p.State(t.Context(), test.candidate); got != test.want {
				t.Errorf("got %d, want %d", got, test.want)
			}
			if service.asked != test.asked {
				t.Errorf("asked %d times, want %d", service.asked, test.asked)
			}
		})
	}
}

func TestStateWithoutService(t *testing.T) {
	p, err := newPodResources("")
	if err != nil || p != nil {
		t.Fatalf("got %v, %v", p, err)
	}
	if got := p.State(t.Context(), candidateOf(main(2))); got != allocation.StateUnknown {
		t.Errorf("got %d", got)
	}
	p.Renew()
	p.Close()

	if p, err = newPodResources(filepath.Join(t.TempDir(), "missing.sock")); err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if got := p.State(t.Context(), candidateOf(main(2))); got != allocation.StateUnknown {
		t.Errorf("got %d", got)
	}
}

// TestStateLimit: a kubelet that is asked too often is asked again.
func TestStateLimit(t *testing.T) {
	service := &answering{}
	service.answer = func(string) (*podresourcesv1.PodResources, error) {
		if service.asked < 4 {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		return nil, errors.New("pod a in namespace default not found")
	}
	if got := serveAnswers(t, service).State(t.Context(), candidateOf(main(2))); got != allocation.StateAbsent {
		t.Errorf("got %d", got)
	}
	service.answer = func(string) (*podresourcesv1.PodResources, error) {
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if got := serveAnswers(t, service).State(ctx, candidateOf(main(2))); got != allocation.StateUnknown {
		t.Errorf("got %d when the time is over", got)
	}
}
