package tokenauth

import (
	"context"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// api is the part of the API server that a Reviewer uses. Both methods return the review with its status.
type api interface {
	ReviewToken(ctx context.Context, review *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error)
	ReviewAccess(ctx context.Context, review *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error)
}

// client implements api with REST clients. client-go's typed clientset would link all kinds of Kubernetes into the device
// plugin, which costs more memory on each GPU node than the rest of the plugin.
type client struct{ authentication, authorization rest.Interface }

func newClient(config *rest.Config) (c client, err error) {
	if c.authentication, err = restClient(config, authenticationv1.SchemeGroupVersion, &authenticationv1.TokenReview{}); err != nil {
		return client{}, err
	}
	c.authorization, err = restClient(config, authorizationv1.SchemeGroupVersion, &authorizationv1.SubjectAccessReview{})
	return c, err
}

func restClient(config *rest.Config, version schema.GroupVersion, kind runtime.Object) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(version, kind)
	metav1.AddToGroupVersion(scheme, version)
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/apis", &version
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(config)
}

func (c client) ReviewToken(ctx context.Context, review *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
	answer := &authenticationv1.TokenReview{}
	err := c.authentication.Post().Resource("tokenreviews").Body(review).Do(ctx).Into(answer)
	return answer, err
}

func (c client) ReviewAccess(ctx context.Context, review *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error) {
	answer := &authorizationv1.SubjectAccessReview{}
	err := c.authorization.Post().Resource("subjectaccessreviews").Body(review).Do(ctx).Into(answer)
	return answer, err
}
