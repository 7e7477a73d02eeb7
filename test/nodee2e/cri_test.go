package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
)

// criWitness is a proxy between the kubelet and the container runtime. It forwards every call unchanged and records the CDI
// devices that the kubelet requests for each container.
type criWitness struct {
	runtime *grpc.ClientConn

	mu      sync.Mutex
	devices map[containerOf][]string
	err     error
}

// watchCRI forwards calls from socket to the container runtime at the socket runtime until the test ends.
func watchCRI(t *testing.T, socket, runtime string) *criWitness {
	t.Helper()
	connection, err := grpc.NewClient("unix:"+runtime, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(untouched{}), grpc.MaxCallRecvMsgSize(criMessage), grpc.MaxCallSendMsgSize(criMessage)))
	must(t, err)
	w := &criWitness{runtime: connection, devices: map[containerOf][]string{}}
	listener, err := net.Listen("unix", socket)
	must(t, err)
	server := grpc.NewServer(grpc.ForceServerCodec(untouched{}), grpc.UnknownServiceHandler(w.pass), grpc.MaxRecvMsgSize(criMessage))
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		must(t, errors.Join(<-served, connection.Close()))
	})
	return w
}

// criMessage is the largest message that the kubelet allows, in bytes.
const criMessage = 16 << 20

// asked returns the CDI devices that were requested so far, by container.
func (w *criWitness) asked() (map[containerOf][]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.devices), w.err
}

// pass forwards one call. Each call of the CRI carries one request.
func (w *criWitness) pass(_ any, kubelet grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(kubelet)
	var request []byte
	if err := kubelet.RecvMsg(&request); err != nil {
		return err
	}
	if strings.HasSuffix(method, "/CreateContainer") {
		w.note(request)
	}
	headers, _ := metadata.FromIncomingContext(kubelet.Context())
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(kubelet.Context(), headers))
	defer cancel()
	runtime, err := w.runtime.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	if err := errors.Join(runtime.SendMsg(&request), runtime.CloseSend()); err != nil {
		return err
	}
	for {
		var answer []byte
		err := runtime.RecvMsg(&answer)
		if errors.Is(err, io.EOF) {
			kubelet.SetTrailer(runtime.Trailer())
			return nil
		}
		if err != nil {
			return err // It contains the runtime's status.
		}
		if err := kubelet.SendMsg(&answer); err != nil {
			return err
		}
	}
}

// note records the CDI devices of a CreateContainerRequest. It parses the request by field numbers (k8s.io/cri-api,
// pkg/apis/runtime/v1/api.proto).
func (w *criWitness) note(request []byte) {
	const (
		config, sandbox                       = 2, 3  // of the request
		configMetadata, configDevices         = 1, 17 // of the container's config
		sandboxMetadata                       = 1     // of the sandbox's config
		metadataName, metadataUID, deviceName = 1, 2, 1
	)
	w.mu.Lock()
	defer w.mu.Unlock()
	name, err := field(request, config, configMetadata, metadataName)
	uid, err2 := field(request, sandbox, sandboxMetadata, metadataUID)
	names, err3 := field(request, config, configDevices, deviceName)
	if err := errors.Join(err, err2, err3); err != nil || len(name) != 1 || len(uid) != 1 {
		w.err = errors.Join(w.err, fmt.Errorf("a container of a name %q and a pod %q is created: %w", name, uid, err))
		return
	}
	w.devices[containerOf{uid[0], name[0]}] = names
}

// field returns all values at a path of field numbers in a message.
func field(message []byte, path ...protowire.Number) (values []string, err error) {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		message = message[n:]
		n = protowire.ConsumeFieldValue(number, kind, message)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		if number == path[0] && kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(message)
			if len(path) == 1 {
				values = append(values, string(value))
			} else {
				inner, err := field(value, path[1:]...)
				if err != nil {
					return nil, err
				}
				values = append(values, inner...)
			}
		}
		message = message[n:]
	}
	return values, nil
}

// untouched is a codec that passes messages through unchanged.
type untouched struct{}

func (untouched) Name() string { return "proto" }

func (untouched) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (untouched) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
