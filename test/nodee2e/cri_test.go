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

	"github.com/gpushare/gpushare/test/framework"
)

// criProxy is a proxy between the kubelet and the container runtime. It forwards every call unchanged and records the CDI
// devices that the kubelet requests for each container.
type criProxy struct {
	runtime *grpc.ClientConn

	mu      sync.Mutex
	devices map[containerOf][]string
	err     error
}

// startCRIProxy forwards calls from socket to the container runtime at the socket runtime until the test ends.
func startCRIProxy(t *testing.T, socket, runtime string) *criProxy {
	t.Helper()
	connection, err := grpc.NewClient("unix:"+runtime, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{}), grpc.MaxCallRecvMsgSize(criMessage), grpc.MaxCallSendMsgSize(criMessage)))
	framework.Must(t, err)
	w := &criProxy{runtime: connection, devices: map[containerOf][]string{}}
	listener, err := net.Listen("unix", socket)
	framework.Must(t, err)
	server := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}), grpc.UnknownServiceHandler(w.forward), grpc.MaxRecvMsgSize(criMessage))
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		framework.Must(t, errors.Join(<-served, connection.Close()))
	})
	return w
}

// criMessage is the largest message that the kubelet allows, in bytes.
const criMessage = 16 << 20

// requested returns the CDI devices that were requested so far, by container.
func (w *criProxy) requested() (map[containerOf][]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.devices), w.err
}

// forward forwards one call. Each call of the CRI carries one request.
func (w *criProxy) forward(_ any, kubelet grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(kubelet)
	var request []byte
	if err := kubelet.RecvMsg(&request); err != nil {
		return err
	}
	if strings.HasSuffix(method, "/CreateContainer") {
		w.record(request)
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

// record records the CDI devices of a CreateContainerRequest. It parses the request by field numbers (k8s.io/cri-api,
// pkg/apis/runtime/v1/api.proto).
func (w *criProxy) record(request []byte) {
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
		w.err = errors.Join(w.err, fmt.Errorf("CreateContainer with name %q and pod %q: %w", name, uid, err))
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

// rawCodec is a codec that passes messages through unchanged.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
