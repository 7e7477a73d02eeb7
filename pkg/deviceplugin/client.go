package deviceplugin

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
)

// Client is the part of the Kubernetes API that the plugin uses: four kinds of objects and four verbs. client-go's clientset
// links and registers every kind of Kubernetes, which costs more memory on each GPU node than the rest of the plugin.
type Client struct {
	// Pods returns the client for the pods of a namespace, or of all namespaces if it is empty.
	Pods  func(namespace string) Objects[*corev1.Pod, *corev1.PodList]
	Nodes Objects[*corev1.Node, *corev1.NodeList]
	// Slices returns metadata of ResourceSlices.
	Slices SliceClient
}

// SliceClient is the client for the metadata of ResourceSlices.
type SliceClient = Objects[*metav1.PartialObjectMetadata, *metav1.PartialObjectMetadataList]

// sliceResource is the resource of ResourceSlices, which Kubernetes has since 1.34.
var sliceResource = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceslices"}

// Objects is the client for one kind of objects. Its methods are those of client-go's clients, which therefore implement it.
type Objects[T, L runtime.Object] interface {
	List(ctx context.Context, options metav1.ListOptions) (L, error)
	Watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error)
	Patch(ctx context.Context, name string, kind types.PatchType, data []byte, options metav1.PatchOptions, subresources ...string) (T, error)
}

// NewClient returns a client for the API server and a sink for events.
func NewClient(config *rest.Config) (Client, events.EventSink, error) {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion,
		&corev1.Pod{}, &corev1.PodList{}, &corev1.Node{}, &corev1.NodeList{}, &corev1.Event{})
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)

	slices, err := metadata.NewForConfig(config)
	if err != nil {
		return Client{}, nil, fmt.Errorf("making a client for metadata: %w", err)
	}
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return Client{}, nil, fmt.Errorf("making a client for the API server: %w", err)
	}
	parameters := runtime.NewParameterCodec(scheme)
	return Client{
		Pods: func(namespace string) Objects[*corev1.Pod, *corev1.PodList] {
			return gentype.NewClientWithList("pods", client, parameters, namespace,
				func() *corev1.Pod { return &corev1.Pod{} }, func() *corev1.PodList { return &corev1.PodList{} })
		},
		Nodes: gentype.NewClientWithList("nodes", client, parameters, "",
			func() *corev1.Node { return &corev1.Node{} }, func() *corev1.NodeList { return &corev1.NodeList{} }),
		Slices: slices.Resource(sliceResource),
	}, &eventSink{client}, nil
}

// eventSink writes each event to the event's own namespace.
type eventSink struct{ client rest.Interface }

// eventTimeout bounds one write. Events are written one at a time; if writes are slow, queued events are dropped.
const eventTimeout = 10 * time.Second

func (s *eventSink) Create(event *corev1.Event) (*corev1.Event, error) {
	return s.send(s.client.Post().Body(event), event.Namespace)
}

func (s *eventSink) Update(event *corev1.Event) (*corev1.Event, error) {
	return s.send(s.client.Put().Name(event.Name).Body(event), event.Namespace)
}

func (s *eventSink) Patch(event *corev1.Event, data []byte) (*corev1.Event, error) {
	return s.send(s.client.Patch(types.StrategicMergePatchType).Name(event.Name).Body(data), event.Namespace)
}

func (s *eventSink) send(request *rest.Request, namespace string) (*corev1.Event, error) {
	ctx, cancel := context.WithTimeout(context.Background(), eventTimeout)
	defer cancel()
	event := &corev1.Event{}
	err := request.Namespace(namespace).Resource("events").Do(ctx).Into(event)
	return event, err
}

// newInformer returns an informer for the objects that the selector matches.
func newInformer[T, L runtime.Object](
	client Objects[T, L], kind T, selector fields.Selector, transform cache.TransformFunc, indexers cache.Indexers,
) (cache.SharedIndexInformer, error) {
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.FieldSelector = selector.String()
			return client.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = selector.String()
			return client.Watch(ctx, options)
		},
	}
	informer := cache.NewSharedIndexInformer(source, kind, 0, indexers)
	return informer, informer.SetTransform(transform)
}
